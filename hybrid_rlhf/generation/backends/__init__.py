"""The two ways in which the generation engine computes completions.

Read `backend.py` first (what both do), then `native.py` (inference weights, KV cache, continuous batching, CUDA graphs)
and `module.py` (the Hugging Face module, for models without inference weights).
"""
