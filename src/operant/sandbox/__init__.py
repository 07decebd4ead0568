"""Processes that may hang, crash, fork or attack: they are limited, and ended with all their descendants.

`process.py` supervises any program; `pool.py` has workers that answer requests as JSON lines, never pickled; `jail.py`
judges untrusted programs; `levels.py` is the table of how far each is isolated; `ray.py` does the last two elsewhere.

This file imports nothing, so that supervisors and workers load only what they need. The package never imports torch.
"""
