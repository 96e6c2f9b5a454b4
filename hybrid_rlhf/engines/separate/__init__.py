"""Inference weights without a training model: a sampler on separate ranks, which receives the actor's weights, a copy
of the critic, which receives the critic's weights, and frozen roles under tensor parallelism.

Read `intervals.py` (parts of a flattened weight), `layout.py` (the parts that the actor's ranks have and the sampler's
ranks need), `routes.py` (the sender of each part), `transfer.py` (buckets and checksums), `received.py` (parts to full
weights, adapters merged), `plane.py` (the time of transfers), then `sampler.py` (the sampler) and `critic_copy.py`.
`reader.py` is a frozen role.
"""
