"""What TRL's own tests need to run here: models of the names that they ask for, and `trl` that means ours."""
