"""Settings of the commands that neither train nor use a model.

Read `replay.py` (`hybrid-rlhf replay`); `demo.yaml` has the settings of the demo.
"""
