"""Small files: read with errors that name file, line and column; written atomically; free of credentials.

Read `atomic.py` (written beside and renamed), `reading.py` (text, JSON, YAML), then `credentials.py` and
`disk_faults.py`.
"""
