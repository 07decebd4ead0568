"""Programs as replies: problems with tests, and the program in a reply. They run in `sandbox.jail`."""
