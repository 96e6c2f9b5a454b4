"""Writes a causal LM to a GGUF file, reads it back (reading.py), and compares before the file gets its name.

Settings, frequencies of rotary positions, every weight, the log-probs of a few tokens, and the tokens of a text are
compared. A model whose file would compute something else is refused.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.models.pretrained.folders import reading
from hybrid_rlhf.models.pretrained.gguf.families import (
    GGUFFamily,
    NamedPart,
    gguf_family,
    head_size,
    named_parts,
    write_metadata,
    written_weight,
)
from hybrid_rlhf.models.pretrained.gguf.positions import rotary, scaling_tensors
from hybrid_rlhf.models.pretrained.gguf.reading import read_gguf
from hybrid_rlhf.models.pretrained.gguf.vocabulary import write_vocabulary
from hybrid_rlhf.models.pretrained.sources import quiet_console, quiet_transformers
from hybrid_rlhf.runtime.files.durable import flush
from hybrid_rlhf.runtime.observability.progress import ProgressLog

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

GGUFType = Literal["f32", "f16", "bf16", "q8_0"]
_PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}
"""Types that numpy has; other types are stored as bytes."""
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_WEIGHT_TOLERANCE = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3, "q8_0": 8e-3}
"""Largest change of a weight, relative to the largest weight of its tensor: the rounding of the type."""
_LOGPROB_TOLERANCE = {"f32": 2e-3, "f16": 0.05, "bf16": 0.25, "q8_0": 0.25}
"""Largest mean change of the probe's log-probs, in nats."""
_PROBE_TEXT = "Hello world, it's 2026: naïve café 你好 🙂\n\n    def f(x): return x+1\t# ok"
_NOT_COMPARED = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",
    "mlp_dropout",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "rope_parameters",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "transformers_version",
    "use_cache",
}
"""Keys of a config that do not affect the computation of a causal LM, that the tokenizer has, or whose effect is
compared."""
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
"""Weights besides vectors that llama.cpp always stores in float32."""


def write_gguf(
    file: Path, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, weights: GGUFType, name: str
) -> float:
    """Write a model, and check the file.

    Args:
        file: file to write, which does not exist.
        lm: a causal LM in float32, on the host.
        tokenizer: its tokenizer.
        weights: type of the weights; vectors are always float32, and rows that do not fit the blocks of q8_0 are f16.
        name: name of the model in the file's metadata.

    Returns:
        the mean change of the log-probs of a few tokens due to the type, in nats.

    Raises:
        UserError: when the format cannot express the model or its tokenizer, or the package gguf is missing; no file is
            left behind.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError("format gguf needs the package gguf, which is not installed: pip install gguf")
    family = gguf_family(lm)
    beside = file.with_name(f".{file.name}.partial.gguf")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(beside, lm, tokenizer, family, weights, name)
        change = _checked(beside, lm, tokenizer, weights)
        flush(beside)
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
    return change


def _write(
    file: Path,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    family: GGUFFamily,
    weights: GGUFType,
    name: str,
) -> None:
    from gguf import GGUFWriter, LlamaFileType, quant_shape_to_byte_shape, quantize

    writer = GGUFWriter(file, family.architecture)
    try:
        writer.add_file_type(LlamaFileType[_FILE_TYPES[weights]])
        write_metadata(writer, family, lm.config, name)
        write_vocabulary(writer, tokenizer, lm.config.vocab_size)
        parts = list(named_parts(lm, family))
        parts += [NamedPart(name, name, name, value) for name, value in scaling_tensors(lm.config).items()]
        kinds = [_kind(part, weights) for part in parts]
        for part, kind in zip(parts, kinds, strict=True):
            shape = quant_shape_to_byte_shape(part.value.shape, kind)
            plain = _PLAIN.get(kind.name)
            writer.add_tensor_info(
                part.written,
                shape if plain is None else part.value.shape,
                plain or np.dtype(np.uint8),
                math.prod(shape),
                raw_dtype=kind,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        progress = ProgressLog(f"writing {file.name[1:]}", total=len(parts), unit="tensors")
        for part, kind in progress.track(list(zip(parts, kinds, strict=True))):
            writer.write_tensor_data(quantize(written_weight(part.part, part.value, family, lm.config).numpy(), kind))
    finally:
        writer.close()


def _kind(part: NamedPart, weights: GGUFType) -> GGMLQuantizationType:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if part.value.dim() == 1 or part.written.endswith(_ROUTERS):
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[weights.upper()]
    fits = part.value.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
    return kind if fits else GGMLQuantizationType.F16


def _checked(file: Path, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: GGUFType) -> float:
    """Read a file back and compare; returns the mean change of the probe's log-probs."""
    rule = f"a GGUF file of {type(lm).__name__} must be readable"
    with quiet_transformers(), quiet_console(), reading(rule, "set --format safetensors"):
        restored, restored_tokenizer = read_gguf(file)
    _check_settings(lm, restored)
    _check_positions(lm, restored)
    stored = dict(restored.named_parameters())
    for name, weight in lm.named_parameters():
        expected = weight.detach().float().cpu()
        read = stored[name].detach()
        scale = float(expected.abs().max()) + 1.0 * name.endswith("norm.weight")
        if (
            expected.shape != read.shape
            or not float((expected - read).abs().max()) <= _WEIGHT_TOLERANCE[weights] * scale
        ):
            raise _differs(f"the weight {name} changes")
    probe = probe_tokens(lm.config.vocab_size)
    change = float((module_logprobs(lm, probe).cpu() - module_logprobs(restored, probe)).abs().mean())
    if not change <= _LOGPROB_TOLERANCE[weights]:
        raise _differs(f"log-probs change by {change:.3g} nats")
    ids = [t(_PROBE_TEXT, add_special_tokens=False)["input_ids"] for t in (tokenizer, restored_tokenizer)]
    if ids[0] != ids[1]:
        raise _differs("its tokenizer splits text differently")
    return change


def _check_positions(lm: PreTrainedModel, restored: PreTrainedModel) -> None:
    """Refuse a changed scale or changed frequencies of rotary positions, those of long contexts included."""
    before, after = _positions(lm), _positions(restored)
    for name, expected in before.items():
        if name not in after or not torch.allclose(expected, after[name], rtol=1e-5, atol=0.0):
            raise _differs(f"{name} of its rotary positions changes")


def _positions(lm: PreTrainedModel) -> dict[str, Tensor]:
    frequencies = {
        name: torch.as_tensor(value).float().cpu()
        for module in lm.modules()
        for name, value in [*module.named_buffers(recurse=False), *vars(module).items()]
        if name.endswith(("inv_freq", "attention_scaling")) and not name.endswith("long_inv_freq")
    }
    first = rotary(lm.config)[0]
    return frequencies | {key: torch.tensor(first[key]) for key in ("long_factor",) if key in first}


def _differs(what: str) -> UserError:
    return UserError(f"a GGUF file must compute what the model does, {what}: set --format safetensors")


def _check_settings(lm: PreTrainedModel, restored: PreTrainedModel) -> None:
    """Refuse a changed setting."""
    before, after = lm.config.to_dict(), restored.config.to_dict()
    before["head_dim"] = head_size(lm.config)
    after["head_dim"] = head_size(restored.config)
    for key in before:
        if key in after and key not in _NOT_COMPARED and not key.startswith("_") and not _same(before[key], after[key]):
            raise _differs(f"{key} {before[key]} becomes {after[key]}")


def _same(before: Any, after: Any) -> bool:
    """Return True if two settings are equal, up to the rounding of numbers to float32."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(before[key], after[key]) for key in before)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    return math.isclose(before, after, rel_tol=1e-6) if numbers else before == after
