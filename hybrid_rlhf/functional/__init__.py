"""Pure tensor functions that import only torch and Triton and can be tested without a model, a process group or a GPU.

Read `masking.py` first (sums and means over ragged rows), then `logprobs.py`, `losses.py` (with the weights of tokens
and estimators of the KL) and `reward_losses.py`, `advantages.py` (RL, with statistics of groups), `distillation.py` and
`calibration.py`; `operations.py` has faster forms of torch's own operations,
`head_kernels.py` those of `logprobs.py` on a GPU; `triton_language.py` stands in for Triton where it is not installed.
"""
