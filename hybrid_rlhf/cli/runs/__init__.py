"""Commands on the folders of runs.

Read `board.py` (a local web server over them) and `replay.py` (samples of a run generated again).
"""
