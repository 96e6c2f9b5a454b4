"""Processes, files and observability; the only folder that calls a collective on the default process group.

Read `command_line.py` (how a command begins and ends) and `world.py` (ranks and collectives), then `run.py` (folder,
log and metrics of one run). `liveness/` ends runs that
hang, `files/` writes files that survive a crash, `observability/` has logs, metrics, timers and profiles, `sandbox/`
runs programs that a model wrote.
"""
