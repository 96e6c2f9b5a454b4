"""Inference weights: how they are planned, split over tensor-parallel ranks and built from training weights.

Read `inference_weights.py` (what is planned once and built after each update), `loader.py` and `picks.py` (training
weights to inference weights), `probe.py` (the check against the model) and `adapters.py`.
"""
