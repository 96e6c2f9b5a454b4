"""Rewards that a program verifies: mathematical answers and code.

Read `verdicts.py` (what a verifier returns), `component.py` (the reward component, and its pool of workers), then
`code.py` and `mathematics.py`; `math_program.py` runs in the sandbox.
"""
