"""The forward pass of the inference weights.

Read `decoder.py` (tokens to logits, and its tensors), `layers.py` (norms, and linear layers, also in 8 bits),
`four_bit.py`, `attention.py` (attention over the KV cache of `cache.py`), `latent.py`, `images.py`, `experts.py`,
`recurrent/` and `adapters.py`.
"""
