"""Prompts to scored completions.

Read `sampler.py` (prompts to completions), `collector.py` (those of one step), `scoring.py` (rewards, log-probs,
values), `async_sampler.py` (completions sampled beside training), `partial.py` (completions that continue in the next
rollout) and `score_scaling.py`.
"""
