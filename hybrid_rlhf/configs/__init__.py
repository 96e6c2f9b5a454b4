"""Frozen dataclasses, YAML and the command line. No torch, so that --help answers in under a second."""
