"""GGUF files, the format of llama.cpp, written and read.

Read `writing.py` (a model to a checked file), `reading.py` (a file to a model), then the parts that both use:
`families.py` (metadata and layout of the weights by family), `positions.py` (scaled rotary positions), and
`vocabulary.py` (a tokenizer as metadata).
"""
