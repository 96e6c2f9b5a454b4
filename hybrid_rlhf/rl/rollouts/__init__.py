"""Prompts to scored completions.

Read `sampler.py` (prompts to completions), `collector.py` (those of one step), `scoring.py` (rewards, log-probs,
values), `async_sampler.py` (completions sampled beside training), `partial.py` (completions that continue in the next
rollout), `score_scaling.py` and `samples.py` (what a run records of them).
"""
