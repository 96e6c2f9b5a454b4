"""Learning from the actor's own completions.

Read `trainer.py` (one step: sample, score, estimate, update), `parts.py` (what a loop works with), `batch/` (the
tensors), `rollouts/` (prompts to scored completions), `algorithms/` (one file per algorithm), `updates/` (the losses
and optimizer steps), `build.py` (a config to a session), `replay/` (recorded samples again).
"""
