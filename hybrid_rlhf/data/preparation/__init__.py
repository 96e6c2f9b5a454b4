"""Files of rows before training: converted, checked, split and blended.

Read `checking.py` (a report on a source as a step reads it), then `splitting.py` and `blending.py`. `conversion/` turns
published formats into rows.
"""
