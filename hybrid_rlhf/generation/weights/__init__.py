"""Inference weights: how they are planned, split over tensor-parallel ranks and built from training weights.

Read `description.py` (a model as numbers), `describe.py` (from a Hugging Face model to a description), `split.py`
(tensor parallelism), `loader.py` (training weights to inference weights), `conversion.py` (both, with the check
against the model).
"""
