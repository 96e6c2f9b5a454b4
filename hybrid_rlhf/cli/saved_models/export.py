"""`hybrid-rlhf export MODEL --output FOLDER`: a model for other programs, adapters merged."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ExportConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.files.atomic import whole_folder
from hybrid_rlhf.runtime.files.reading import user_path
from hybrid_rlhf.runtime.observability.logs import LOADING_LIBRARIES, logger
from hybrid_rlhf.runtime.output import print_result

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hybrid_rlhf.models.pretrained.gguf.writing import GGUFType
    from hybrid_rlhf.models.pretrained.loading import Architecture

_GGUF_TYPES: dict[str, GGUFType] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}


@command(ExportConfig, positional="path")
def main(config: ExportConfig) -> None:
    """Export the model, and print its size."""
    output = user_path(config.output)
    if output.exists():
        raise UserError(f"--output must not exist, {config.output} does: choose another, or remove it")
    logger.info(LOADING_LIBRARIES)
    import torch

    from hybrid_rlhf.cli.saved_models.export_check import check_export, require_program
    from hybrid_rlhf.models.pretrained.adapters import merge_adapter
    from hybrid_rlhf.models.pretrained.folders import load_config, warn_of_remote_code
    from hybrid_rlhf.models.pretrained.gguf.language_model import language_model
    from hybrid_rlhf.models.pretrained.gguf.writing import write_gguf
    from hybrid_rlhf.models.pretrained.loading import is_scorer
    from hybrid_rlhf.models.pretrained.sources import resolve_model
    from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
    from hybrid_rlhf.runtime.world import solo_world

    if config.check:
        require_program(config.format)
    world = solo_world(torch.device("cpu"))
    warn_of_remote_code(config.trust_remote_code, world)
    path = resolve_model(config.path, world=world)
    adapter = None if config.adapter is None else user_path(config.adapter)
    has_own = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(adapter) if has_own else path, trust_remote_code=config.trust_remote_code)
    source = load_config(path, trust_remote_code=config.trust_remote_code)
    stored = source.dtype or torch.float32
    dtype = str(stored).removeprefix("torch.") if config.dtype == "stored" else config.dtype
    if dtype not in _GGUF_TYPES:
        raise UserError(f"--dtype must be {', '.join(_GGUF_TYPES)}, {config.path} is stored in {dtype}: set --dtype")
    # float32 avoids rounding when an adapter is merged or a GGUF file compared.
    wide = config.format == "gguf" or config.adapter is not None
    role: Architecture = "scorer" if is_scorer(source) else "causal_lm"
    if config.check and role == "scorer":
        raise UserError(f"--check compares completions, {config.path} is a reward model: leave it out")
    logger.info("reading %s", config.path)
    lm = _load(path, role, config, torch.float32 if wide else stored)
    if config.adapter is not None:
        logger.info("merging %s", config.adapter)
        lm = merge_adapter(lm, config.adapter)
    logger.info("writing %s (%s)%s", output, dtype, " and reading it back" * (config.format == "gguf"))
    result: dict[str, Any] = {"output": str(output), "format": config.format, "dtype": dtype}
    if config.format == "gguf":
        if (text := language_model(lm)) is not lm:
            logger.warning("format gguf takes the language model of %s alone: %s reads no images", config.path, output)
            lm = text
        result["logprob_change"] = write_gguf(
            output, lm, tokenizer, weights=_GGUF_TYPES[dtype], name=Path(config.path).name
        )
        text = f"{output}: {dtype}, read back; log-probs change by {result['logprob_change']:.2g} nats on average"
    else:
        _save_folder(output, lm, role, tokenizer, getattr(torch, dtype), config, card=Path(path, "README.md"))
        text = f"{output}: {dtype}"
    result["bytes"] = sum(file.stat().st_size for file in ([output] if output.is_file() else output.rglob("*")))
    size, unit = (2**30, "GiB") if result["bytes"] >= 2**29 else (2**20, "MiB")
    text = f"{text}, {result['bytes'] / size:.2f} {unit}"
    if not config.check:
        print_result(result, text)
        return
    logger.info("comparing completions of %s and %s", config.path, output)
    del lm  # the reference is another model: merging has changed this one
    reference = _with_adapter(_load(path, "causal_lm", config, torch.float32), config.adapter)
    found = check_export(output, reference, tokenizer, dtype=dtype, trust_remote_code=config.trust_remote_code)
    print_result(result | {"check": asdict(found)}, f"{text}\n{found.text}")
    if found.faults:
        sys.exit(1)


def _with_adapter(lm: PreTrainedModel, adapter: str | None) -> PreTrainedModel:
    """A model with an adapter beside its weights, as peft computes it."""
    if adapter is None:
        return lm
    from peft import PeftModel

    from hybrid_rlhf.models.pretrained.adapters import with_rows_of

    wrapped = PeftModel.from_pretrained(with_rows_of(lm, adapter), str(user_path(adapter)))
    return wrapped.eval()  # type: ignore[return-value]


def _load(path: str, role: Architecture, config: ExportConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model in its stored form."""
    from hybrid_rlhf.configs.sections.model import ModelConfig
    from hybrid_rlhf.models.pretrained.loading import load_model

    lm, _ = load_model(
        path,
        role,
        config=ModelConfig(path=path, trust_remote_code=config.trust_remote_code),
        dtype=dtype,
        heads=None,
    )
    return lm.eval()


def _save_folder(
    output: Path,
    lm: PreTrainedModel,
    role: Architecture,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    config: ExportConfig,
    *,
    card: Path,
) -> None:
    """Write a folder, with the card of the source if it has one, and read it back: its logits must be those of the
    model, whose weights are rounded to the dtype here."""
    import torch

    from hybrid_rlhf.engines.partition import full_tensors
    from hybrid_rlhf.models.pretrained.adapters import probe_logits, require_equal_logits
    from hybrid_rlhf.models.pretrained.saving import save_model
    from hybrid_rlhf.runtime.observability.progress import ProgressLog
    from hybrid_rlhf.runtime.world import solo_world

    world = solo_world(torch.device("cpu"))
    for part in (lm.config, *(getattr(lm.config, name) for name in lm.config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    progress = ProgressLog(f"writing {output}", total=len([*lm.parameters()]), unit="tensors")
    with whole_folder(output) as beside:
        save_model(
            beside,
            ((name, _converted(name, weight, dtype)) for name, weight in progress.track(full_tensors(lm, world))),
            lm=lm,
            tokenizer=tokenizer,
            world=world,
            max_shard_bytes=int(config.shard_gib * 2**30),
            card=card.read_text() if card.is_file() else None,
        )
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        written = _load(str(beside.absolute()), role, config, lm.dtype)
        require_equal_logits(probe_logits(written), probe_logits(lm), str(output))


def _converted(name: str, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A weight converted to a dtype; other tensors are unchanged."""
    if weight is None or not weight.is_floating_point():
        return weight
    converted = weight.to(dtype)
    if not converted.isfinite().all() and weight.isfinite().all():
        raise UserError(f"weights must fit --dtype, {name} is beyond the range of {dtype}: set --dtype bfloat16")
    return converted
