"""`hybrid-rlhf port`: runs of other systems as configurations of this project.

Read `reading.py` (options out of files and commands), `conversion.py` (their values as settings), then `port.py` (the
command, which writes the file). The names are in `configs/other_systems/`.
"""
