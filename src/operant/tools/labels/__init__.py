"""People label replies: a local page, a database that outlives kills, agreement, and files for training.

`items.py` reads files of replies and checks answers; `store.py` keeps items and labels in one SQLite file, which a
program may share with the server; `server.py` serves the page; `agreement.py` compares labellers; `export.py` writes
files that training reads. docs/rlhf.md describes all of it for people who label.
"""
