"""Where metrics go besides metrics.jsonl: TensorBoard, CSV, Weights & Biases, MLflow, Trackio.

Read `sink.py` (the interface, and the thread that each sink has), then `files.py` (TensorBoard, CSV) and `trackers.py`
(the others).
"""
