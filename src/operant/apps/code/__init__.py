"""Programs as replies: problems with tests, made from seeds too, and the program in a reply. They run in a jail."""
