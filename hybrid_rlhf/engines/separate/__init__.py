"""Inference weights without a training model: a sampler on separate ranks, which receives the actor's weights, and a
copy of the critic, which receives the critic's weights.

Read `broadcast.py` (buckets of weights and their checksums), `synced.py` (inference weights that follow a trained
model), then `sampler.py` (the sampler) and `critic_copy.py`.
"""
