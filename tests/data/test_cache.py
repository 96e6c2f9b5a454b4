"""Hosts without a shared file system: each creates its own entry, and an error on one ends all. Memory of writing."""

from __future__ import annotations

import datetime
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.cache import cached_rows, tokenizer_key
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_ranks
from tests.support.tiny import CHATML, tiny_tokenizer


def on_two_hosts(world: World, folder: Path, blocked: str) -> dict[str, Any]:
    """Rows made with a folder of each rank's own; then again where rank 1's is a file."""
    here = replace(world, local_rank=0)
    made = []

    def rows() -> Iterator[dict[str, Any]]:
        made.append(world.rank)
        yield {"input_ids": [1, 2]}

    result: dict[str, Any] = {"rows": cached_rows({}, rows, cache_dir=str(folder / f"{world.rank}"), world=here)[:]}
    try:
        cached_rows({}, rows, cache_dir=blocked if world.rank else str(folder / "other"), world=here)
    except UserError as error:
        result["refused"] = str(error)
    return {**result, "made": made}


def test_each_host_creates_its_own_entry_and_an_error_ends_all(tmp_path: Path) -> None:
    blocked = tmp_path / "a_file"
    blocked.touch()
    first, second = run_ranks(on_two_hosts, 2, tmp_path / "ranks", tmp_path, str(blocked))
    assert first["rows"] == second["rows"] == {"input_ids": [[1, 2]]}
    assert first["made"] == [0, 0] and second["made"] == [1, 1]
    assert first["refused"] == second["refused"]
    assert f"data.cache_dir must be a writable folder, {blocked}" in first["refused"]


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Those of a day ago: another process may be writing a newer one."""
    for name, hours in (("old", 25), ("new", 23)):
        folder = tmp_path / "tokens" / f"{name}.partial"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - hours * 3600,) * 2)
    rows = iter([{"input_ids": [1]}])
    cached_rows({}, lambda: rows, cache_dir=str(tmp_path), world=solo_world(torch.device("cpu")))
    assert [folder.name for folder in (tmp_path / "tokens").glob("*.partial")] == ["new.partial"]


def test_few_rows_are_in_memory_as_lists(tmp_path: Path) -> None:
    """All rows were lists, 70 bytes per token: a million conversations exceed the memory of a host."""
    alive = weakref.WeakSet[Row]()
    most = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal most
        for number in range(5000):
            row = Row(input_ids=[1] * (number >= 2000), number=number)  # the type of empty lists is known later
            alive.add(row)
            most = max(most, len(alive))
            yield row

    found = cached_rows({}, rows, cache_dir=str(tmp_path), world=solo_world(torch.device("cpu")))
    assert found["number"][:] == list(range(5000)) and found["input_ids"][:] == [[]] * 2000 + [[1]] * 3000
    assert most <= 2000, "two batches"


class Row(dict[str, Any]):
    """A row that can be counted."""

    __hash__ = object.__hash__


def test_the_day_is_in_the_key_of_templates_that_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cached last month would keep its date, while environments render today's."""

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2031, 1, 2)

    dated = tiny_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    before = [tokenizer_key(tokenizer) for tokenizer in (dated, tiny_tokenizer())]
    monkeypatch.setattr("hybrid_rlhf.data.cache.date", Tomorrow)
    after = [tokenizer_key(tokenizer) for tokenizer in (dated, tiny_tokenizer())]
    assert before[0] != after[0] and before[1] == after[1]
