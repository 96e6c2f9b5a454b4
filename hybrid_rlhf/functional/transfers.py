"""Many tensors from the host to a device by one copy.

A copy from pageable memory waits until the device has finished its work, and each copy is a launch. So all tensors are
written to one page-locked buffer first, and become views of its copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; kernels read up to 16 at a time."""
T = TypeVar("T")


def moved(tree: T, device: torch.device) -> T:
    """Dicts, sequences and dataclasses with their tensors on a device, those of the host by one copy for which the host
    does not wait. Attributes of tensors move too. Unchanged for a CPU."""
    if device.type == "cpu":
        return tree
    on_host = list({id(tensor): tensor for tensor in _tensors(tree) if tensor.device.type == "cpu"}.values())
    whole, views = joined(on_host, pin=device.type == "cuda")
    here = views(whole.to(device, non_blocking=True))
    return _replaced(tree, {id(old): new for old, new in zip(on_host, here, strict=True)})  # type: ignore[no-any-return]


def joined(tensors: Sequence[Tensor], *, pin: bool = False) -> tuple[Tensor, Any]:
    """The bytes of tensors in one buffer, page-locked with `pin`, and a function that views the tensors in a copy."""
    parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    sizes = [-(-len(part) // _ALIGNMENT) * _ALIGNMENT for part in parts]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pin)
    for slot, part in zip(whole.split(sizes), parts, strict=True):
        slot[: len(part)] = part

    def views(copy: Tensor) -> list[Tensor]:
        slots = zip(copy.split(sizes), parts, tensors, strict=True)
        return [slot[: len(part)].view(tensor.dtype).view(tensor.shape) for slot, part, tensor in slots]

    return whole, views


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
        yield from _tensors(vars(tree))
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif is_dataclass(tree):
        yield from _tensors(vars(tree))


def _replaced(tree: Any, by_id: dict[int, Tensor]) -> Any:
    """The tree with other tensors, by the ids of its own."""
    if next(_tensors(tree), None) is None:
        return tree
    if isinstance(tree, Tensor):
        new = by_id.get(id(tree), tree)
        vars(new).update(_replaced(vars(tree), by_id))
        return new
    if isinstance(tree, dict):
        return {name: _replaced(value, by_id) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replaced(value, by_id) for value in tree)
    return replace(tree, **_replaced(vars(tree), by_id))
