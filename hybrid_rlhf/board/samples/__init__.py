"""Queries of a run's samples, up to hundreds of thousands, without reading samples.jsonl for each request.

Read `index.py` (the SQLite database of a run, updated from the file), `lines.py` (prompts and words of a line),
`queries.py` (filters and order), then `rows.py` (rows and single samples in the API's form, with their tokens).
"""
