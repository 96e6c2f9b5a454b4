"""From command-line words and nested settings to a frozen config, and back.

Read `building.py` (words and settings to a config), then `schema.py` (the keys of a config, and defaults that follow
from other keys), `help.py`, `listing.py` (all keys, and those that a resumed run may change), `values.py` and
`yaml_text.py`. Files are read in runtime/command_line.py.
"""
