"""Scheduling of requests, and the KV cache that they use.

Read `requests.py` (from prompts to requests, and one completion), `images.py` (the images of a prompt),
`continuous.py` (what each step computes), `blocks.py` (KV blocks, prefixes) and `capacity.py` (how many fit in memory),
`sampler.py` and `workspace.py` (tensors, tokens and CUDA graphs of a step), `arrivals.py` (requests of other threads).
"""
