"""The contents of run folders.

Read `folders.py` (the runs), `summary.py` (the state of a run), `metrics.py` (its curves) and `reading.py` (reading of
untrusted files).
"""
