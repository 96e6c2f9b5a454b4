"""Rows from files, folders and the Hugging Face hub, and the formats of a row.

Read `sources.py` (reading rows), then `formats.py` (their meaning: messages, prompt and completion, pairs, ranks) and
`placing.py` (where their images are). `stepwise.py` and `conditional.py` handle rows for process reward models and
conditional SFT; `embedded.py` writes the data set of the demo.
"""
