"""Training one model on a data set: SFT, distillation, reward models, preference losses.

Read `trainer.py` (the loop and the interface of an objective), `objectives/sft.py` (the shortest objective),
`preference/dpo.py`, then `build.py` (a config to a run). `calibration.py` runs after a reward model is trained.
"""
