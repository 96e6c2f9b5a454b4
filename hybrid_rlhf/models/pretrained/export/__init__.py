"""Models for other programs: adapters merged, GGUF files.

Read `gguf_file.py` (a model to a checked file), then `gguf_families.py` (metadata and layout of the weights by family)
and `gguf_vocabulary.py` (a tokenizer as metadata). `adapters.py` merges PEFT adapters.
"""
