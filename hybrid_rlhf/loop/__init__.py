"""Shared by the supervised and the RL trainer.

Read `trainer.py` (the training loop), `setup.py` (before the loop: model, tokenizer, config), `checkpointing.py`
(writing checkpoints and resuming), `non_finite.py` (skipped updates), `loss_sums.py` (losses over micro-batches and
ranks), `saving.py` (models at the end of a run) and `model_card.py` (their README.md). `user_code.py` imports a user's
functions and classes, `advice/` judges curves, `report/` writes the page of a run.
"""
