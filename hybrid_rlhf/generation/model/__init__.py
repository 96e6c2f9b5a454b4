"""The forward pass of the inference weights.

Read `decoder.py` (tokens to logits), `decoder_weights.py` (its tensors), `layers.py` (linear layers and norms),
`attention.py` (attention over the KV cache of `cache.py`), `latent.py`, `experts.py`, `recurrent/`, `quantised.py` and
`adapters.py`.
"""
