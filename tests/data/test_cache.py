"""Hosts without a shared file system: each creates its own entry, and an error on one ends all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.cache import cached_rows
from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_ranks


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
