"""Which requests run together, and the KV cache they use.

Read `requests.py` (one completion) and `request_maker.py` (from prompts to requests), `continuous.py` and `rows.py`
(what each step computes), `blocks.py` (KV blocks, prefixes) and `capacity.py` (how many fit in memory),
`decode_batch.py`, `sampler.py` and `workspace.py` (tensors, tokens and CUDA graphs of a step), `arrivals.py` (requests
of other threads).
"""
