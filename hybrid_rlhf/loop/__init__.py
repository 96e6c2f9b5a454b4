"""Shared by the supervised and the RL trainer.

Read `trainer.py` (the training loop), `setup.py` (before the loop: model, tokenizer, config), `checkpointing.py` (when
checkpoints are written, and resuming), `non_finite.py` (skipped updates), `loss_sums.py` (losses over micro-batches and
ranks) and `saving.py` (models at the end of a run). `user_code.py` imports a user's functions and classes.
`advice/` finds what is unhealthy in the curves of a run, `report/` writes a page when it ends.
"""
