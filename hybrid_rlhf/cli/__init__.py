"""Commands: each module parses its config, imports torch after parsing, and calls the library.

Read `main.py` (the console script `hybrid-rlhf` and its subcommands), then `train.py` (all steps, one process group per
step). `sft.py`, `reward.py`, `preference.py` and `rl.py` run one step; `chat.py`, `generate.py` and `serve.py` use a
saved model (`saved_models/loading.py`); `plan.py` and `demo.py` are `train` with a preset; `saved_models/comparison.py`
prints the report after `train`.
"""
