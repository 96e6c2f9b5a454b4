"""`hybrid-rlhf serve MODEL`: a saved model over HTTP, with OpenAI's API, or a reward model that scores."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hybrid_rlhf.configs.credentials import expanded_key
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_document, print_result, wants_json


@command(ServeConfig, positional="path")
def main(config: ServeConfig) -> None:
    """Load the model and serve it."""
    api_key = expanded_key(config.api_key, key="api_key")
    from hybrid_rlhf.serving.packages import require_packages

    require_packages("serve")
    import torch

    from hybrid_rlhf.cli.saved_models.loading import engine_at, find_model, load_lm, load_scorer
    from hybrid_rlhf.serving.scores import ScoreService
    from hybrid_rlhf.serving.server import LoadedModel, Served, serve

    scorer = partial(load_scorer, max_image_pixels=config.max_image_pixels)

    def load() -> Served:
        place = find_model(config)
        beside = [f"adapters {', '.join(config.adapters)}"] if config.adapters else []
        beside += [f"reward model {config.reward_model}"] if config.reward_model else []
        progress(", ".join([f"loading {place.name} in {str(place.dtype)[6:]} on {place.device}", *beside]))
        if place.scores:
            config.check_scores_alone()
            alone = ScoreService(scorer(place), max_queue=config.max_queue, name=config.served_name)
            return Served(None, alone)
        engine = engine_at(place, kv_cache_gib=config.kv_cache_gib, adapters=config.adapters)
        judge = config.reward_model
        scores = ScoreService(scorer(find_model(config, judge)), max_queue=config.max_queue) if judge else None
        on_host = replace(place, device=torch.device("cpu"))
        return Served(LoadedModel(engine, place.tokenizer, place.device, lambda: load_lm(on_host)), scores)

    run_server(
        config.served_name, "serving", lambda report: serve(config, load, api_key, report=report, progress=progress)
    )


def progress(text: str) -> None:
    """Print a line about the start, which is no result."""
    print(text, file=sys.stderr, flush=True)


def run_server(name: str, what: str, serve: Callable[[Callable[[str], None]], bool]) -> None:
    """Run a server until its end, and exit with its code.

    Args:
        name: name of the model.
        what: what the server does with it.
        serve: takes a function that receives its URL, and returns False if it has failed.
    """
    from hybrid_rlhf.serving.server import FAILED_EXIT_CODE

    def report(url: str) -> None:
        print_result({"event": "serving", "model": name, "url": url}, f"{what} {name} on {url}")

    start = time.perf_counter()
    if not serve(report):
        sys.exit(FAILED_EXIT_CODE)
    if wants_json():
        print_document({"model": name, "seconds": time.perf_counter() - start})
