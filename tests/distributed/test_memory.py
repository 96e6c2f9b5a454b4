"""Under ZeRO-3 no rank ever holds a whole model: not when loading, not when saving."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from hybrid_rlhf.engines.builder import build_actor, build_engine
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_model, tiny_tokenizer


class PeakPrivateMemory:
    """The most private memory of this process while it is entered, less what it had before, in bytes.

    Pages of mapped files belong to the page cache, which ranks of a host share; they do not count.
    """

    def __enter__(self) -> Self:
        self._before = self.peak = _private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak -= self._before

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _private_bytes())


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def measure(world: World, path: Path, folder: Path, stage: int) -> tuple[int, int]:
    build_actor(actor_spec(path.parent / "warm", stage=stage), world)  # libraries allocate at their first use
    frozen = actor_spec(path, stage=stage)
    with PeakPrivateMemory() as loading:
        engine = build_engine(replace(frozen, optimizer=None), world)
    with PeakPrivateMemory() as saving:
        tensors = full_tensors(engine.lm, world)
        save_model(folder, tensors, lm=engine.lm, tokenizer=tiny_tokenizer(), world=world, max_shard_bytes=2**25)
    return loading.peak, saving.peak


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model().save_pretrained(folder / "warm")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    big = tiny_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, **heads)
    big.save_pretrained(folder / "big", max_shard_size="100MB")
    return folder


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_no_rank_holds_a_whole_model(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # glibc keeps freed blocks for later unless they are mapped; what it keeps is not held by anyone.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    size = sum(file.stat().st_size for file in (models / "big").glob("*.safetensors"))
    assert size > 3e8
    for loading, saving in run_ranks(
        measure, 2, tmp_path / "r", models / "big", tmp_path / "saved", 3, start_method="spawn"
    ):
        # its own half, and a part that is gathered at a time
        assert loading < 0.65 * size, f"{loading / size:.2f} of the model while loading"
        assert saving < 0.25 * size, f"{saving / size:.2f} of the model while saving"
