"""DeepSpeed engines: training, weight sync to inference weights, checkpoints. The only package that imports deepspeed.

Read `engine.py` (train one model), `hybrid.py` (the actor, which also generates), `builder.py` and `ds_config.py`
(config sections to engines), `partition.py` (full weights from ZeRO-3), `saved/` (checkpoints to resume from),
`averaging.py` and `residency/` (what is on the device in each phase); `separate/` (inference weights on ranks without a
training model) and `sampling_engine.py` (the interface that such a sampler shares with the actor). Private members of
DeepSpeed are used only in `deepspeed_internals.py`.
"""
