"""What `evaluate` measures: a module per measure, each from a config and rows to a `Measurement`.

Read `results.py` (what a measure gives, intervals), `held_out.py` (perplexity, accuracy), then `completing.py`,
`pass_rate.py` and `win_rate.py` with its `judges.py`; `harness.py` runs lm-evaluation-harness.
"""
