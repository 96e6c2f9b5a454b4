"""Model folders: resolved, checked, loaded and saved.

Read `names.py` (how a user names a model), `sources.py` (hub name, folder or GGUF to a folder), `folders.py` (checks
of a folder), `loading.py` (folder to model), `quantised.py` (MXFP4), `adapters.py` (adapters of peft), `tokenizers.py`,
`saving.py` (model to folder, one shard at a time), `cards.py` (its README.md), `embedded.py` (the model of the demo),
`gguf/` (files of llama.cpp).
"""
