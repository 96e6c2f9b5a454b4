"""Hugging Face models as the library trains them; model families differ in this package and in generation only.

Read `pretrained/loading.py` (a config to a model), then `policy.py` (log-probs and values of a batch), `families/`
(what differs between families) with `head_check.py` (the check of it), `packing/` (batches without padding),
`routers/` (losses of mixtures of experts), `lora.py`, `distillation.py` (student and teacher), `fused_layers.py` and
`activation_offload.py`.
"""
