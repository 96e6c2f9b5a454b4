"""Settings: frozen dataclasses, YAML files and the command line. Imports no torch, so `--help` answers at once.

Read `sft.py` (the config of one step), then `rl.py` with `algorithms.py` (one dataclass per algorithm), `sections/`
(the parts that steps share), then `parsing/command_line.py` (how a file and overrides become a config). `commands/` has
the settings of commands that neither train nor use a model; `files/` reads and writes small files; `errors.py` has the
errors that a user sees as one line.
"""
