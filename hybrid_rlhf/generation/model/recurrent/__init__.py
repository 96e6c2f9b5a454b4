"""Recurrent layers: layers whose memory of the tokens before is a state of fixed size.

Read `states.py` (the states of all rows, and how a step reads and writes them), `scan.py` (the recurrence, one token or
many at once), `mixers.py` (the layers).
"""
