"""Inference weights without a training model: a sampler on ranks of its own, which receives the actor's weights, a copy
of the critic, which receives its, and frozen roles under tensor parallelism.

Read `intervals.py` (parts of a flattened weight), `layout.py` (what the actor's ranks hold and the sampler's need),
`routes.py` (which rank sends which part to which), `transfer.py` (buckets and checksums), `received.py` (parts to full
weights, adapters merged), `plane.py` (when they travel), then `sampler.py` (the sampler itself) and
`critic_copy.py`. `reader.py` is a frozen role.
"""
