"""Writes Hugging Face folders one shard at a time: safetensors, config, tokenizer, processor, model card.

Weights have the names and shapes of the files that were loaded, or else of the family's, which may differ from those in
memory (experts are separate).

Writes are atomic: all files are written to a temporary folder, flushed and renamed, config.json last, so a folder with
a config.json is complete. A failed save leaves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from hybrid_rlhf.models.lora import plain_name
from hybrid_rlhf.models.pretrained.cards import CARD_FILE, may_write_card
from hybrid_rlhf.models.pretrained.processors import write_processor
from hybrid_rlhf.runtime.files.durable import flush
from hybrid_rlhf.runtime.world import World

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def save_model(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor | None]],
    *,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    max_shard_bytes: int = 4 * 2**30,
    card: str | None = None,
) -> None:
    """Write a model; every rank calls, rank 0 writes.

    Args:
        folder: folder of the files; other files in it are kept, except for weights of an earlier save.
        tensors: names and weights one by one, on rank 0; see `engines.partition.full_tensors`.
        lm: model whose config and generation config are written.
        tokenizer: tokenizer to write beside the weights, with its chat template.
        world: the ranks that iterate over `tensors` together.
        max_shard_bytes: size of the largest weights file, and of the largest part in memory.
        card: README.md of the folder, unless a user wrote one there; None leaves the file unchanged.
    """
    beside = folder / ".model.partial"
    try:
        writer = _ShardWriter(beside, max_shard_bytes) if world.is_main else None
        joined = _joined_names(lm)
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if writer is None or tensor is None:
                continue
            held[name] = tensor
            if held.keys() >= set(parts := joined.get(name, [name])):
                for stored, value in revert_weight_conversion(lm, {part: held[part] for part in parts}).items():
                    # safetensors needs tensors with their own memory
                    writer.add(stored, value if value is tensor else value.clone())
                for part in parts:
                    del held[part]
        if writer is not None:
            writer.close()
            _save_rest(beside, lm, tokenizer)
            if card is not None and may_write_card(folder):
                (beside / CARD_FILE).write_text(card)
            _move(beside, folder)
    except Exception:
        if world.is_main:
            shutil.rmtree(beside, ignore_errors=True)  # free the space: the disk may be full
        raise
    world.barrier()


def _joined_names(lm: PreTrainedModel) -> dict[str, list[str]]:
    """Names of the weights that are one tensor in the files (query, key and value), by each of them. `lm` may have
    adapters; names are those without."""
    conversions = getattr(lm, "_weight_conversions", None)
    if conversions is None:  # as in revert_weight_conversion
        conversions = get_model_conversion_mapping(lm, add_legacy=False)
    converters = [one.reverse_transform() for one in conversions[::-1] if isinstance(one, WeightConverter)]
    joined: dict[str, list[str]] = defaultdict(list)
    for name in (plain_name(name) for name, _ in lm.named_parameters() if ".lora_" not in name):
        stored, pattern = apply_converters(name, converters)
        if pattern is not None:
            joined[stored].append(name)
    return {name: names for names in joined.values() if len(names) > 1 for name in names}


def _save_rest(folder: Path, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write everything except weights."""
    lm.config.architectures = [type(lm).__name__]
    lm.config.pad_token_id = tokenizer.pad_token_id
    lm.config.save_pretrained(folder)
    if lm.can_generate() and lm.generation_config is not None:
        # save_pretrained raises where loading only warned (temperature without do_sample) if the end tokens changed
        lm.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    tokenizer.save_pretrained(folder)
    write_processor(lm, folder)


def _move(beside: Path, folder: Path) -> None:
    """Flush all files, rename them, config.json last, and remove the weights of an earlier save."""
    files = [file.relative_to(beside) for file in beside.rglob("*") if file.is_file()]
    files.sort(key=lambda file: file == Path("config.json"))
    for file in files:
        flush(beside / file)
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)  # additional chat templates are in a folder
        os.replace(beside / file, folder / file)
    for pattern in (_WEIGHTS, _INDEX, "model-?????-of-?????.safetensors"):
        for stored in folder.glob(pattern):  # transformers would read a single file of an earlier save before shards
            if stored.relative_to(folder) not in files:
                stored.unlink()
    shutil.rmtree(beside)


class _ShardWriter:
    """Collects tensors and writes a file whenever they exceed a size."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        if folder.exists():
            shutil.rmtree(folder)  # left by an interrupted save
        folder.mkdir(parents=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and self._held_bytes + tensor.nbytes > self._max_bytes:
            self._write()
        self._held[name] = tensor
        self._held_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _write(self) -> None:
        save_file(self._held, self._folder / f"shard-{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held = {}
        self._held_bytes = 0

    def close(self) -> None:
        self._write()
        if len(self._shards) == 1:
            (self._folder / "shard-0").rename(self._folder / _WEIGHTS)
            return
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self._folder / f"shard-{number}").rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2))
