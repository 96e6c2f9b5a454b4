"""From words and nested settings to a frozen config, and back.

Read `building.py` (words and settings to a config), then `schema.py` (which keys there are), `derived.py` (defaults
that follow from other keys), `help.py`, `listing.py`, `values.py` and `yaml_text.py`. `resuming.py` says which keys a
resumed run may change. Files are read in runtime/command_line.py.
"""
