"""Commands on models that steps have saved.

Read `loading.py` (device, engine and tokenizer of a model), then `chat.py` with `terminal.py` (its view on a terminal),
`generate.py`, `serve.py`, `train_server.py`, `evaluate.py` with `evaluation/` (its measures), `export.py` and
`push.py`. `comparison.py` prints the report after `train`.
"""
