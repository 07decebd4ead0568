"""What a run goes on with: its checkpoint, changed options, what was found out by measuring."""
