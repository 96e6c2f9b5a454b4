"""Measures of `evaluate`, one module each: from a config and rows to a `Measurement`.

Read `results.py` (results and their intervals), `held_out.py` (perplexity, accuracy), then `completing.py`,
`pass_rate.py` and `win_rate.py`.
"""
