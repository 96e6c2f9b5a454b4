"""Sampling by vLLM, in its own environment and processes, or on other hosts (docs/vllm.md).

Read `process.py` (a server that this rank starts), then `sampler.py` (weight sync, check, and the engine that samples).
The requests are in generation/backends/vllm.py.
"""
