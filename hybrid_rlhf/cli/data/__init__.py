"""`hybrid-rlhf data`: commands on files of rows.

Read `subcommands.py` (the dispatch), then `check.py`, `convert.py`, `split.py` and `blend.py`; each calls data/.
"""
