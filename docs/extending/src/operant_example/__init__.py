"""One file for each kind of part that operant takes from other packages."""
