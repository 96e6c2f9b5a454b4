"""Destinations of metrics besides metrics.jsonl: TensorBoard, CSV, Weights & Biases, MLflow, Trackio.

Read `sink.py` (the interface, and the thread of each sink), then `files.py` (TensorBoard, CSV) and `trackers.py` (the
others).
"""
