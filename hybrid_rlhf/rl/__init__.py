"""Learning from the actor's own completions.

Read `trainer.py` (one step: sample, score, estimate, update), `batch/` (the tensors), `rollouts/` (prompts to scored
completions), `algorithms/` (one file per algorithm), `updates/` (the losses and optimizer steps), `build.py` (a config
to a run), `replay/` (recorded samples again).
"""
