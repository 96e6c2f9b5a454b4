"""Inference weights: planned, split over tensor-parallel ranks, and built from training weights.

Read `inference_weights.py` and `picks.py` (training weights to inference weights: planned once, built after each
update), `probe.py` (the check against the model) and `adapters.py`.
"""
