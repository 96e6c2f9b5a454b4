"""Settings: frozen dataclasses, YAML and the command line. Imports no torch, so `--help` answers at once, and reads no
file.

Read `sft.py` (the config of one step), then `rl.py` with `algorithms.py` (one dataclass per algorithm), `sections/`
(the parts that steps share), then `parsing/building.py` (how settings and overrides become a config). `commands/` has
the settings of commands that neither train nor use a model, `credentials.py` what may not stand in a setting;
`errors.py` has the errors that a user sees as one line.
"""
