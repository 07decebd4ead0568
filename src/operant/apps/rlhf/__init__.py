"""Reward models, and how they judge labels."""
