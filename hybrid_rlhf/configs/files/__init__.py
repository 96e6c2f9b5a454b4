"""Small files: read with errors that name file, line and column; written atomically; free of credentials.

Read `atomic.py` (written beside and renamed), `reading.py` (text, JSON, YAML), then `cache.py` (the cache
folder), `credentials.py`, `urls.py` and `disk_faults.py`.
"""
