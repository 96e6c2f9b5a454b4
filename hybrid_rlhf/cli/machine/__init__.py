"""Commands about the machine: its installation, its memory and its speed.

Read `env.py` (versions, devices, faults), `plan.py` (memory and placement of `train`) and `calibrate.py` (the measured
curves that its times come from); `completion.py` completes the line in a shell.
"""
