"""Prompts to scored completions.

Read `sampler.py` (prompts to completions), `collector.py` (those of one step, sampled at it or ahead), `scoring.py`
(rewards, log-probs, values), `advantages.py` (scores to advantages), `exchange.py` (completions of all ranks),
`partial.py` (completions that continue in the next rollout) and `samples.py` (what a run records of them).
"""
