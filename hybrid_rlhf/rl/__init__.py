"""Learning from the actor's own completions.

Read `types.py` (Episode, Rollout, Batch: what a step computes with), `trainer.py` (one step: take, score, estimate,
update, log), `parts.py` (what a loop works with), `sharing.py` (which rank holds which rows), `mini_batches.py` (which
rank computes them when), `rollouts/` (prompts to scored completions), `algorithms/` (one file per algorithm),
`updates/` (the losses and optimizer steps), `build.py` (a config to a session), `replay/` (recorded samples again).
"""
