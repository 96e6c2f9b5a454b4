"""Pure tensor functions that import only torch and can be tested without a model, a process group or a GPU.

Read `masking.py` first (sums and means over ragged rows), then `logprobs.py`, `losses.py` and `reward_losses.py`,
`divergences.py` and `advantages.py` (RL), `groups.py` and `aggregation.py` (group statistics, token weights),
`distillation.py` and `calibration.py`; `products.py` and `fused.py` are faster forms of torch's own operations.
"""
