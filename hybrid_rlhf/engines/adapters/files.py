"""Adapters in files: PEFT folders with the optimizer's state beside, and parked adapters."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.adapters.adapter import Adapter
from hybrid_rlhf.models.lora import write_adapter_folder
from hybrid_rlhf.models.pretrained.folders import reading
from hybrid_rlhf.runtime.files.atomic import write_whole

OPTIMIZER = "optimizer.safetensors"
_AVERAGES = ("exp_avg", "exp_avg_sq")
_STEPS = "steps"


def write_folder(
    folder: Path, adapter: Adapter, *, base: str, targets: list[str], transposed: bool, with_optimizer: bool
) -> None:
    """Write an adapter for `PeftModel.from_pretrained`; the folder appears once complete.

    Args:
        folder: folder to write; replaced if it exists.
        adapter: the adapter.
        base: name of the base model, for the config.
        targets: target_modules of the config.
        transposed: true if the base stores weights as [in, out].
        with_optimizer: also write the optimizer's averages and number of steps, in `OPTIMIZER`.
    """
    from peft import LoraConfig, TaskType

    config = LoraConfig(
        base_model_name_or_path=base,
        task_type=TaskType.CAUSAL_LM,
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # any factor, in spite of its annotation
        target_modules=targets,
        fan_in_fan_out=transposed,
        inference_mode=True,
    )
    weights = {f"base_model.model.{name}": _stored(part) for name, part in adapter.named("weights")}
    files = {}
    if with_optimizer:
        states = _AVERAGES if adapter.steps else ()
        averages = {f"{name}.{state}": _stored(part) for state in states for name, part in adapter.named(state)}
        files[OPTIMIZER] = save(averages, {_STEPS: str(adapter.steps)})
    write_adapter_folder(folder, weights, config, files=files)


@torch.no_grad()
def read_state(adapter: Adapter, state: str, stored: dict[str, Tensor], folder: Path) -> None:
    """Set a state from tensors by peft's names.

    Raises:
        UserError: if a tensor is missing or has another shape.
    """
    for name, part in adapter.named(state):
        if name not in stored or stored[name].shape != part.shape:
            shape = list(stored[name].shape) if name in stored else "nothing"
            raise UserError(
                f"an adapter must fit its base, {folder} has {shape} for {name}, which has {list(part.shape)}: give "
                "the model that it was trained on"
            )
        part.copy_(stored[name])


def read_optimizer(adapter: Adapter, folder: Path) -> None:
    """Set the averages and the number of steps from a folder of `write_folder`.

    Raises:
        UserError: if the folder has none for this adapter.
    """
    file = folder / OPTIMIZER
    if not file.is_file():
        raise UserError(
            f"an adapter with its optimizer has {OPTIMIZER}, {folder} has none: load it without the optimizer"
        )
    with reading(f"{OPTIMIZER} must be safetensors, {file} is not", "load the adapter without the optimizer"):
        stored = load_file(file)
        with safe_open(file, framework="pt") as opened:
            steps = int(opened.metadata()[_STEPS])
    for state in _AVERAGES if steps else ():
        suffix = f".{state}"
        read_state(
            adapter,
            state,
            {name.removesuffix(suffix): x for name, x in stored.items() if name.endswith(suffix)},
            folder,
        )
    adapter.steps = steps


class ParkedTensors:
    """Tensors of a parked adapter, in a file or in host memory."""

    def __init__(self, name: str, tensors: dict[str, Tensor], folder: Path | None) -> None:
        """Store tensors.

        Args:
            name: name of the adapter.
            tensors: the tensors.
            folder: folder of the file; None: host memory.
        """
        self._file = None if folder is None else folder / f"{quote(name, safe='')}.safetensors"
        self._tensors: dict[str, Tensor] = {}
        if self._file is None:
            self._tensors = {state: tensor.cpu() for state, tensor in tensors.items()}
        else:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, save(tensors))

    def read(self) -> dict[str, Tensor]:
        """Return the tensors."""
        return self._tensors if self._file is None else load_file(self._file)

    def discard(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink()


def _stored(part: Tensor) -> Tensor:
    """A contiguous copy in host memory, which safetensors writes."""
    return part.detach().to("cpu", copy=True).contiguous()
