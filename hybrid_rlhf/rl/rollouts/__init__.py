"""From prompts to scored completions.

Read `sampler.py` (prompts to completions), `stream.py` (which prompts are sampled in a step), `collector.py` (the
completions that a step learns from), `scoring.py` (rewards, log-probs, values), `advantages.py` (scores to advantages),
`curriculum.py` (which prompts a step takes), `live.py` (the batch that outlives a step), `in_flight.py` (completions
that continue in the next one) and `samples.py` (records of completions).
"""
