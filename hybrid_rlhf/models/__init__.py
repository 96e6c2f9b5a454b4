"""Hugging Face models as the library trains them; model families differ in this package and in generation only.

Read `pretrained/loading.py` (a folder to a model), then `policy.py` (log-probs and values of a batch), `families/`
(differences between families), `head_check.py` (a check of logits when a model is loaded), `packing/` (batches without
padding), `routers/` (losses of mixtures of experts),
`expert_parallel.py` (experts that ranks split), `lora.py`, `distillation.py` (a teacher of SFT),
`fused_layers.py` and `activation_offload.py`.
"""
