"""Files that survive a crash.

Read `durable.py` (flushing and checksums), `checkpoint_folder.py` (which checkpoints are complete), `json_lines.py`
(metrics and samples), `folder_lock.py` (one process per run folder) and `disk.py` (errors of a full or failing disk).
"""
