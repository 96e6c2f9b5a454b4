"""The folder of everything that is computed or downloaded once per machine: tokenized rows, dequantised models,
measured choices.
"""

from __future__ import annotations

from pathlib import Path

from hybrid_rlhf.configs.files.reading import user_path

CACHE = "~/.cache/hybrid_rlhf"


def cache_folder(cache_dir: str | None = None) -> Path:
    """The folder that a setting names; None: ~/.cache/hybrid_rlhf."""
    return user_path(cache_dir or CACHE)
