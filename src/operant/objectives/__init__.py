"""The pure functions of training: losses, advantages, and KL between policy and reference."""
