"""Recurrent layers: layers whose memory of the tokens before is a state of fixed size.

Read `states.py` (the states of all rows, and how a step reads and writes them) and `mixers.py` (the layers). The
recurrences are in `generation/ops/recurrence.py`.
"""
