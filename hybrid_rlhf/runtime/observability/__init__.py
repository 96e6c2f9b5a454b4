"""What a run reports: logs, metrics, samples, progress, timers and profiles.

Read `logs.py` and `metrics.py` first; `timers.py`, `progress.py`, `samples.py` and `profiling.py` stand alone.
"""
