"""State that a run needs to resume, and its files.

Read `checkpoints.py` (the folder of a checkpoint, written by all ranks), `training_state.py` (one engine) and
`fragments.py` (weights and optimizer states in parts that any number of ranks and any ZeRO stage can read).
"""
