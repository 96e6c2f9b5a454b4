"""`hybrid-rlhf board FOLDER...`: a local web server over run folders, live during training."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.runtime.command_line import parse_config, user_errors
from hybrid_rlhf.runtime.output import print_document, print_result, wants_json

_PACKAGES = ("fastapi", "uvicorn")
_KV_CACHE_GIB = 1.0
"""Of each model of a chat: a run may need the rest of the device."""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Parse, then serve until a signal."""
    with user_errors():
        words = list(sys.argv[1:] if argv is None else argv)
        folders = list(takewhile(lambda word: not word.startswith("-"), words))
        line = [*([f"--folders={json.dumps(folders)}"] if folders else []), *words[len(folders) :]]
        config = parse_config(BoardConfig, line, prog=prog)
        missing = [name for name in _PACKAGES if find_spec(name) is None]
        if missing:
            raise UserError(
                f"board needs fastapi and uvicorn, {missing[0]} is not installed: pip install 'hybrid_rlhf[board]'"
            )
        from hybrid_rlhf.board.server import run_board

        def report(runs: int, url: str) -> None:
            print_result({"event": "serving", "runs": runs, "url": url}, f"board of {runs} runs on {url}")

        run_board(config, _load, report=report)
        if wants_json():
            print_document({"folders": config.folders})


def _load(config: InferenceConfig) -> Any:
    """Engine and tokenizer of a model; torch is imported when the first is loaded."""
    from hybrid_rlhf.cli.saved_models.loading import load_engine

    return load_engine(config, kv_cache_gib=_KV_CACHE_GIB)


if __name__ == "__main__":
    main()
