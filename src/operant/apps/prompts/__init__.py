"""Prompts for frozen task models: what they are written into, who answers them, and how the answers are measured."""
