"""From prompts to scored completions.

Read `sampler.py` (prompts to completions), `collector.py` (the completions of a step, sampled at the step or ahead),
`scoring.py` (rewards, log-probs, values), `advantages.py` (scores to advantages), `curriculum.py` (which prompts a step
takes), `partial.py` (completions that continue in the next rollout) and `samples.py` (records of completions).
"""
