"""Commands about the machine: what fits on it and how fast it is.

Read `plan.py` (memory and placement of `train`) and `calibrate.py` (the measured curves that its times come from).
"""
