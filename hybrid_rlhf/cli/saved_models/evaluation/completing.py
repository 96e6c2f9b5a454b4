"""Prompts from rows, and completions of them by a saved model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybrid_rlhf.cli.saved_models.evaluation.held_out import source_rows
from hybrid_rlhf.cli.saved_models.loading import load_engine
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.data.chat.conversation import completion_text
from hybrid_rlhf.data.rows.formats import PromptRow, read_prompt_row
from hybrid_rlhf.generation.image_loading import PromptEncoder
from hybrid_rlhf.runtime.observability.progress import ProgressLog


def read_prompts(config: EvaluateConfig) -> list[tuple[str, PromptRow]]:
    """The prompts to complete, each with its location for errors."""
    return [(where, read_prompt_row(where, row, refusal="")) for where, row in source_rows(config)]


def complete(
    config: EvaluateConfig, prompts: Sequence[tuple[str, PromptRow]], *, model: str | None = None
) -> list[list[str]]:
    """Texts [i][j]: sample j of prompt i.

    Args:
        config: sampling and seed; sampling.seed, if set, replaces the seed.
        prompts: the result of `read_prompts`.
        model: name of another model; None: the config's.

    Raises:
        UserError: when there is no such model, or a prompt is longer than max_length.
    """
    engine, tokenizer = load_engine(config, name=model)
    try:
        encode = PromptEncoder(tokenizer, engine.image_reader, max_pixels=config.max_image_pixels)
        encoded = [encode(where, row.messages, row.images, tools=row.tools) for where, row in prompts]
        for (where, _), (ids, _) in zip(prompts, encoded, strict=True):
            if len(ids) > config.max_length:
                raise UserError(
                    f"{where}: a prompt may have max_length {config.max_length} tokens, it has {len(ids)}: raise it"
                )
        sampling = config.sampling if config.sampling.seed is not None else replace(config.sampling, seed=config.seed)
        progress = ProgressLog("completing", total=len(prompts) * sampling.n, unit="completions")
        sampled = engine.generate(
            [ids for ids, _ in encoded],
            sampling,
            on_completed=progress.advance,
            images=[images for _, images in encoded],
        )
    finally:
        engine.close()  # the next model needs its memory
    return [[completion_text(completion.token_ids, tokenizer) for completion in samples] for samples in sampled]
