"""Reports of a run: logs, metrics, samples, progress, timers and profiles.

Read `logs.py` and `metrics.py` first, then `sinks/` (TensorBoard and trackers) and `alerts.py` (messages to a webhook);
`timers.py`, `progress.py`, `samples.py`, `token_records.py` (read without torch; `token_log.py` writes them) and
`profiling.py` stand alone.
"""
