"""`hybrid-rlhf train-server MODEL`: adapters of a model, trained and sampled over HTTP with Tinker's API."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_document, print_result, wants_json


@command(TrainServerConfig, positional="path")
def main(config: TrainServerConfig) -> None:
    """Load the model and serve it."""
    api_keys = config.expanded_api_keys()
    from hybrid_rlhf.serving.packages import require_packages

    require_packages("train-server")
    from hybrid_rlhf.cli.saved_models.loading import find_model, load_lm
    from hybrid_rlhf.data.chat.conversation import stop_token_ids
    from hybrid_rlhf.engines.adapters import AdapterEngine, AdapterRow
    from hybrid_rlhf.generation import GenerationEngine
    from hybrid_rlhf.runtime.world import solo_world
    from hybrid_rlhf.serving.server import CPU_MEMORY_SHARE, FAILED_EXIT_CODE
    from hybrid_rlhf.serving.training.server import LoadedBase, serve_training
    from hybrid_rlhf.serving.training.trainer import Trainer

    def load(folder: Path) -> LoadedBase:
        place = find_model(config)
        print(f"loading {place.name} in {str(place.dtype)[6:]} on {place.device}", file=sys.stderr, flush=True)
        lm = load_lm(place)
        place.tokenizer.save_pretrained(folder / "tokenizer")
        engine = AdapterEngine(
            lm,
            world=solo_world(place.device),
            micro_batch_tokens=config.micro_batch_tokens,
            max_resident=config.max_resident_adapters,
        )
        generation = GenerationEngine.from_model(
            lm, tokenizer=place.tokenizer, kv_cache_gib=config.kv_cache_gib, cuda_graphs=False
        )
        if not generation.backend.continues:
            raise UserError(
                f"train-server samples with inference weights, {type(lm).__name__} has none: train it with its own run "
                "(lora)"
            )
        generation.maker.stop_token_ids |= {*stop_token_ids(place.tokenizer, None)}
        batch = generation.open(
            rows=config.max_batch_rows,
            max_tokens=config.max_sequence_tokens,
            memory_share=CPU_MEMORY_SHARE if place.device.type == "cpu" else 0.5,
        )
        trainer = Trainer(
            engine,
            AdapterRow,
            base_model=config.served_name,
            tokenizer=place.tokenizer,
            tokenizer_id=str((folder / "tokenizer").absolute()),
            max_tokens=batch.max_tokens,
            batch_tokens=config.micro_batch_tokens,
        )
        return LoadedBase(trainer, generation, batch)

    def report(name: str, url: str) -> None:
        print_result({"event": "serving", "model": name, "url": url}, f"training of {name} on {url}")

    start = time.perf_counter()
    if not serve_training(config, load, api_keys=api_keys, report=report):
        sys.exit(FAILED_EXIT_CODE)
    if wants_json():
        print_document({"model": config.served_name, "seconds": time.perf_counter() - start})
