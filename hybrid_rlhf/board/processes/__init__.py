"""Commands that the board starts, each in a process of its own.

Read `commands.py` (how one is started), `jobs.py` (short ones, one at a time: replay, branch, rescore), `training.py`
(runs: start, stop, resume), `form.py` (the settings of a run as a form), `presets.py` (what a
form begins with) and `estimates.py` (its memory and speed).
"""
