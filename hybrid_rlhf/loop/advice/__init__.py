"""Advice: rules that find an unhealthy run in the curves of its metrics.

Read `advisor.py` (the application of the rules), then `rules.py` (the table) and the rules in `rl.py` and
`training.py`. The log, the report and the webhook use the same table.
"""
