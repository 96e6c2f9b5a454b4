"""Which requests run together, and the KV cache they use.

Read `requests.py` (one completion), `continuous.py` and `rows.py` (what each step computes), `blocks.py` (KV blocks,
prefixes), `cache.py` and `capacity.py` (pages, and how many fit in memory), `decode_batch.py` and `workspace.py`
(tensors and CUDA graphs of a step), `arrivals.py` (requests of other threads).
"""
