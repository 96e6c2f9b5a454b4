"""From files and the command line to a frozen config, and back.

Read `command_line.py` (words to a config), then `schema.py` (which keys there are), `derived.py` (defaults that follow
from other keys), `help.py`, `listing.py` and `values.py`. `output.py` prints results as text or JSON; `resuming.py`
says which keys a resumed run may change.
"""
