"""Commands on the folders of runs.

Read `replay.py` (samples of a step generated again, continued or scored anew).
"""
