"""`hybrid-rlhf data`: commands on files of rows.

Read `check.py`, `convert.py`, `split.py` and `blend.py`; each calls data/.
"""
