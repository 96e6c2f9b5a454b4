"""Samples of a recorded step: generated again, continued from a token, scored again.

Read `recorded.py` (the run's records of the step), `replaying.py` (a resumed run up to the step's rollout, and the
comparison), `branching.py` (other continuations) and `rescoring.py` (scores of edited completions).
"""
