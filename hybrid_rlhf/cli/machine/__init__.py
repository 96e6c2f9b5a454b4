"""Commands about the machine: what is installed, what fits on it and how fast it is.

Read `env.py` (versions, devices, faults), `plan.py` (memory and placement of `train`) and `calibrate.py` (the measured
curves that its times come from); `completion.py` with `scripts.py` completes the line in a shell.
"""
