"""`hybrid-rlhf serve MODEL`: a saved model over HTTP, with OpenAI's API."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.configs.parsing.command_line import parse_config, user_errors
from hybrid_rlhf.configs.parsing.output import print_document, print_result, wants_json


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Parse, load the model, serve; torch is imported after parsing."""
    with user_errors():
        words = list(sys.argv[1:] if argv is None else argv)
        config = parse_config(ServeConfig, words, prog=prog, positional="path")
        api_key = config.expanded_api_key()
        from hybrid_rlhf.serving.packages import require_packages

        require_packages("serve")
        from hybrid_rlhf.cli.saved_models.loading import find_model, load_adapted, load_engine, load_scorer
        from hybrid_rlhf.serving.scores import ScoreService
        from hybrid_rlhf.serving.server import LoadedModel, serve

        def load() -> LoadedModel:
            if config.adapters and config.kv_cache_gib is not None:
                return LoadedModel(*load_adapted(config, config.adapters, kv_cache_gib=config.kv_cache_gib))
            return LoadedModel(*load_engine(config, kv_cache_gib=config.kv_cache_gib))

        def load_scores() -> ScoreService:
            return ScoreService(load_scorer(find_model(config, config.reward_model)))

        def report(name: str, url: str) -> None:
            print_result({"event": "serving", "model": name, "url": url}, f"serving {name} on {url}")

        start = time.perf_counter()
        serve(config, load, api_key=api_key, report=report, load_scores=load_scores if config.reward_model else None)
        if wants_json():
            print_document({"model": config.model_name or config.path, "seconds": time.perf_counter() - start})


if __name__ == "__main__":
    main()
