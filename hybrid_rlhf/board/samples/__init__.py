"""The samples of a run, millions of them, without reading them whole.

Read `index.py` (columns beside samples.jsonl, kept up with it), `lines.py` (what of a line they hold), `texts.py` (its
text search), `view.py` and `queries.py` (filters and order), then `rows.py` (rows and single samples as the API shows
them, with their tokens).
"""
