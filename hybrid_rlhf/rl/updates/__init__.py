"""Optimizer updates from one rollout.

Read `updater.py` (epochs and mini-batches), `policy_loss.py` (the actor's loss on a micro-batch), `last_logprobs.py`
(what its updates saw of each token), `kl_controller.py` and `ptx.py` (pretraining text mixed in).
"""
