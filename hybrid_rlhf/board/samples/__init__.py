"""The samples of a run, millions of them, without reading them whole.

Read `index.py` (columns beside samples.jsonl, kept up with it), `texts.py` (its text search), `queries.py` (filters and
order), then `rows.py` (rows and single samples as the API shows them, with their tokens).
"""
