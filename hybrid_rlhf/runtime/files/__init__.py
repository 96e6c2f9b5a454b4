"""Files that a user names, read or refused in one line, and files of a run, which survive a crash.

Read `reading.py` (text and JSON of the user) and `atomic.py` (atomic writes), then `durable.py` (flushing and
checksums), `checkpoint_folder.py` (complete checkpoints), `json_lines.py` (metrics and samples), `folder_lock.py` (one
process per run folder) and `disk.py` (errors of a full or failing disk).
"""
