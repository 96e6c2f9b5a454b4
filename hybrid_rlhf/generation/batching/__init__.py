"""Which requests decode together, and the KV cache they use.

Read `requests.py` (one completion), `continuous.py` (requests join and leave between steps), `cache.py` and `slots.py`
(the KV cache, and how many completions fit in memory), `decode_batch.py` and `workspace.py` (tensors and CUDA graphs of
a decoding step), `prefixes.py` (shared prompts).
"""
