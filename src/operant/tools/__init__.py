"""Tools over the core and its applications: the command line, reports, labels, sweeps, the memory of a run."""
