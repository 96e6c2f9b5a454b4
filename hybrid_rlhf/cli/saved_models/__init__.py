"""Commands on models that steps have saved.

Read `loading.py` (where a model runs, its engine and tokenizer), then `chat.py` (its view on a terminal:
`terminal.py`), `generate.py`, `serve.py`, `evaluate.py` (its measures: `evaluation/`), `export.py` and `push.py`.
`comparison.py` prints the report after `train`.
"""
