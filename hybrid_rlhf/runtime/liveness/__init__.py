"""Ends a run that hangs or has lost a rank, and handles signals.

Read `watchdog.py` (a thread on every rank), `heartbeats.py` (its TCP connections), `stall_report.py` (activity of each
rank), then `signals.py` (SIGTERM, SIGUSR1) and `launcher.py` (stops ranks whose launcher has died).
"""
