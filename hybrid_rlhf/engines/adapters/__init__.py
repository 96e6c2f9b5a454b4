"""One frozen base model and many LoRA adapters that train in packed batches whose rows belong to different adapters.

Read `engine.py` (the operations), `adapter.py` (weights and optimizer state of one adapter), `products.py` (the
products of a packed batch) and `files.py` (PEFT folders, parked adapters).
"""

from hybrid_rlhf.engines.adapters.engine import AdapterEngine, AdapterRow, RowResult

__all__ = ["AdapterEngine", "AdapterRow", "RowResult"]
