"""Reports of runs: the page of a run, its live server, and the comparison of several runs."""
