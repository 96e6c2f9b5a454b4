"""Settings of the commands that neither train nor use a model.

Read `data.py` (`hybrid-rlhf data ...`), `machine.py` (`env`, `completion`) and `board.py` (`board`); `demo.yaml` has
the settings of the demo.
"""
