"""Files: those that a user names, read or refused in one line, and those of a run, which survive a crash.

Read `reading.py` (text and JSON of the user) and `atomic.py` (whole or not there), then `durable.py` (flushing and
checksums), `checkpoint_folder.py` (which checkpoints are complete), `json_lines.py` (metrics and samples),
`folder_lock.py` (one process per run folder) and `disk.py` (errors of a full or failing disk).
"""
