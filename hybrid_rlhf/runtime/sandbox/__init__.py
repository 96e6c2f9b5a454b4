"""Programs that a model wrote, run apart from the run.

Read `process.py` (the interface, and a process whose time and output are limited), then `local.py` (namespaces and
limits of this machine), `docker.py` (containers) and `container.py` (containers of either that stay).
"""
