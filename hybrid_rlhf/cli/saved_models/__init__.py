"""Commands on models that steps have saved.

Read `loading.py` (the engine and tokenizer of all of them), then `chat.py`, `generate.py` and `serve.py`;
`comparison.py` prints the report after `train`.
"""
