"""Settings of the commands that neither train nor use a model.

Read `board.py` (`hybrid-rlhf board`); `demo.yaml` has the settings of the demo.
"""
