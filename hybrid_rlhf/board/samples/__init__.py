"""The samples of a run, hundreds of thousands of them, without reading samples.jsonl whole for each question.

Read `index.py` (the SQLite database of a run, kept up with the file), `lines.py` (prompts and words of a line),
`queries.py` (filters and order), then `rows.py` (rows and single samples as the API shows them, with their tokens).
"""
