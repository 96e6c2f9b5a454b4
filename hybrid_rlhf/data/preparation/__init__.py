"""Files of rows before training: converted, checked, split and blended.

Read `checking.py` (what a step would make of a source), then `splitting.py` and `blending.py`; `lines.py` writes rows.
`conversion/` turns published formats into rows.
"""
