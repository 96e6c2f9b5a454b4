"""`hybrid-rlhf board FOLDER...`: a local web server over run folders, live during training."""

from __future__ import annotations

from typing import Any

from hybrid_rlhf.configs.commands.board import BoardConfig
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_document, print_result, wants_json
from hybrid_rlhf.serving.packages import require_packages

_KV_CACHE_GIB = 1.0
"""KV cache of each chat model: a run may need the rest of the device."""


@command(BoardConfig, positional="folders")
def main(config: BoardConfig) -> None:
    """Serve the board until a signal."""
    require_packages("board", "board")
    from hybrid_rlhf.board.server import run_board

    def report(runs: int, url: str) -> None:
        print_result({"event": "serving", "runs": runs, "url": url}, f"board of {runs} runs on {url}")

    run_board(config, _load, _load_scorer, report)
    if wants_json():
        print_document({"folders": config.folders})


def _load(config: InferenceConfig) -> Any:
    """Load the engine and tokenizer of a model; torch is imported with the first model."""
    from hybrid_rlhf.cli.saved_models.loading import load_engine

    return load_engine(config, kv_cache_gib=_KV_CACHE_GIB)


def _load_scorer(config: InferenceConfig) -> Any:
    from hybrid_rlhf.cli.saved_models.loading import find_model, load_scorer

    return load_scorer(find_model(config))
