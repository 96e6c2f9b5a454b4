"""Commands on the folders of runs.

Read `board.py` (a local web server over them) and `replay.py` (samples of a step generated again, continued or scored
anew).
"""
