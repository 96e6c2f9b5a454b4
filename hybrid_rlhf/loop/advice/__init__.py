"""Advice: rules that find an unhealthy run in the curves of its metrics.

Read `advisor.py` (when a rule fires), then `rules.py` (the table) and the rules in `rl.py` and `training.py`. The log,
the report and the webhook use the same table.
"""
