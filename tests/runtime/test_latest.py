"""Values that were used last: beside a list that is searched and summed, with linear work, and in threads."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hybrid_rlhf.runtime.latest import LatestValues


def test_the_last_values_within_the_bytes_are_kept() -> None:
    """Also larger ones than fit, and after all are forgotten; sizes are asked for at most twice per value."""
    rng = random.Random(0)
    asked = made = 0

    def tensors(value: Tensor) -> Iterable[Tensor]:
        nonlocal asked
        asked += 1
        return [value]

    kept = LatestValues[Tensor](40, tensors)
    slow: list[tuple[int, int]] = []
    for step in range(2000):
        if step == 1000:
            kept.clear()
            slow.clear()
        key = rng.randrange(12)
        size = 60 if key == 0 else 4 * key
        known = any(key == other for other, _ in slow)
        before = made

        def make(size: int = size) -> Tensor:
            nonlocal made
            made += 1
            return torch.zeros(size, dtype=torch.uint8)

        assert len(kept.get(key, make)) == size
        assert (made == before) == known
        slow = [pair for pair in slow if pair[0] != key] + [(key, size)]
        while sum(each for _, each in slow) > 40:
            del slow[0]
    assert asked <= 2 * made


def test_threads_get_their_own_values() -> None:
    kept = LatestValues[Tensor](30 * 8, lambda value: [value])
    keys = [random.Random(thread).choices(range(50), k=500) for thread in range(4)]

    def read(keys: list[int]) -> list[int]:
        return [int(kept.get(key, lambda key=key: torch.tensor(key))) for key in keys]  # type: ignore[misc]

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(read, keys)] == keys
