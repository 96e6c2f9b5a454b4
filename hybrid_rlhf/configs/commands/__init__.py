"""Settings of the commands that neither train nor use a model.

Read `data.py` (`hybrid-rlhf data ...`) and `machine.py` (`env`, `completion`); `demo.yaml` has those of the demo.
"""
