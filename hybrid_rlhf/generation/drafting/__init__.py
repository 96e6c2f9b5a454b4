"""Speculative decoding: tokens that are guessed, verified together in one step, and kept as long as they are right.

Read `drafter.py` (what an engine holds), `sources.py` (where drafts come from), `places.py` (the step that verifies
them) and `trial.py` (whether drafts pay).
"""
