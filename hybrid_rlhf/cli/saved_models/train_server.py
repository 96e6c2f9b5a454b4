"""`hybrid-rlhf train-server MODEL`: adapters of a model, trained and sampled over HTTP with Tinker's API."""

from __future__ import annotations

from pathlib import Path

from hybrid_rlhf.cli.saved_models.serve import progress, run_server
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.runtime.command_line import command


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
    from hybrid_rlhf.runtime.files.atomic import whole_folder
    from hybrid_rlhf.runtime.files.disk import kept_if_full
    from hybrid_rlhf.runtime.world import solo_world
    from hybrid_rlhf.serving.server import CPU_MEMORY_SHARE
    from hybrid_rlhf.serving.training.base import LoadedBase
    from hybrid_rlhf.serving.training.server import serve_training

    def load(folder: Path) -> LoadedBase:
        place = find_model(config)
        progress(f"loading {place.name} in {str(place.dtype)[6:]} on {place.device}")
        lm = load_lm(place)
        with kept_if_full(folder / "tokenizer"), whole_folder(folder / "tokenizer") as beside:
            place.tokenizer.save_pretrained(beside)
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
        return LoadedBase(
            engine,
            AdapterRow,
            generation,
            batch,
            base_model=config.served_name,
            tokenizer=place.tokenizer,
            tokenizer_id=str((folder / "tokenizer").absolute()),
            batch_tokens=config.micro_batch_tokens,
        )

    run_server(
        config.served_name,
        "training of",
        lambda report: serve_training(config, load, api_keys, report=report),
    )
