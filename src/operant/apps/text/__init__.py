"""Scores and rewards of texts, and public data sets of texts."""
