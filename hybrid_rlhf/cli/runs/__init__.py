"""Commands on the folders of runs.

Read `board.py` (a local web server over run folders) and `replay.py` (samples of a step generated again, continued or
scored again).
"""
