"""Applications on the core: each has its models, rewards and forms of data in one folder, and sees no other."""
