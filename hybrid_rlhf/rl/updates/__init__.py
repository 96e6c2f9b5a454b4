"""Optimizer updates from one rollout.

Read `updater.py` (epochs and mini-batches, what the updates saw of each token), `policy_loss.py` (the actor's loss on a
micro-batch) and `ptx.py` (pretraining text mixed in).
"""
