"""Settings: frozen dataclasses that pydantic reads, YAML and the command line. This folder imports no torch, and
pydantic only once a config is built, so that `--help` is fast; and it reads no file.

Read `sft.py` (the config of one step), then `rl.py` with `algorithms.py` (one dataclass per algorithm), `sections/`
(the parts that steps share), then `parsing/building.py` (from settings and overrides to a config). `commands/` has the
settings of commands that neither train nor use a model, `credentials.py` detects secrets in settings; `errors.py` has
the errors that a user sees as one line.
"""
