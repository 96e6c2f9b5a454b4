"""Recurrent layers: layers that remember earlier tokens in a state of fixed size.

Read `states.py` (the states of all rows, and their use in a step) and `mixers.py` (the layers). The
recurrences are in `generation/ops/recurrence.py`.
"""
