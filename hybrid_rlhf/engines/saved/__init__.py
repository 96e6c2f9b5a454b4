"""What a run needs to resume, and the files that hold it.

Read `checkpoints.py` (the folder of a checkpoint, written by all ranks), `training_state.py` (one engine) and
`fragments.py` (weights and optimizer states as parts that any number of ranks and any ZeRO stage reads).
"""
