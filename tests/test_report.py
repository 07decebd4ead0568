"""The page of a run: what it is told, that it is whole and small, and how it looks in a browser."""
