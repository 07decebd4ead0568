"""Prompts as policies: what a prompt is worth to a frozen model that classifies or rewrites texts with it."""
