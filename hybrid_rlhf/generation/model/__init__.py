"""The forward pass of the inference weights.

Read `decoder.py` (tokens to logits), `layers.py` (linear layers, norms, activations), `attention.py` (attention over
the KV cache) and `kernels/` (Triton kernels for a GPU).
"""
