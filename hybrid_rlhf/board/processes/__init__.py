"""Commands that the board starts, each in a separate process.

Read `commands.py` (starting a command), `jobs.py` (short commands, one at a time: replay, branch, rescore),
`training.py` (runs: start, stop, resume), `form.py` (the settings of a run as a form), `presets.py` (initial values of
a form) and `estimates.py` (memory and speed of its settings).
"""
