"""Commands: each module parses its config (`runtime/command_line.py`), imports torch after parsing, and calls the
library.

Read `main.py` (the console script `hybrid-rlhf` and its subcommands), then `train.py` (all steps, one process group per
step). `sft.py`, `reward.py`, `preference.py` and `rl.py` run one step; `demo.py` is `train` with a preset;
`saved_models/` uses models that steps have saved; `runs/` reads the folders of runs; `machine/` plans and measures.
"""
