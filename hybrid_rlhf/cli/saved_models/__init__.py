"""What commands do with models that steps have saved.

Read `loading.py` (the engine and tokenizer of `chat` and `generate`) and `comparison.py` (the report after `train`).
"""
