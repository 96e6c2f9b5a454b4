"""What is in run folders.

Read `folders.py` (which runs there are), `summary.py` (the state of one), `metrics.py` (its curves) and `reading.py`
(files that may be anything).
"""
