"""The routers of mixtures of experts in training.

Read `modules.py` (the router modules of a model, and routing without noise), then `losses.py` (load balancing and
router z-loss) and `replay.py` (the experts of sampling, compared with those of training or used in their place).
"""
