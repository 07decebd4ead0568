"""Interfaces of other libraries over operant: scripts written for them run with another import."""
