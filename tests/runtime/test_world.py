"""Resources released before the ranks leave their process group."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.runtime.world import close_with_world, close_world, init_world, solo_world
from tests.support.errors import user_error
from tests.support.generation import PROMPTS, SAMPLED
from tests.support.tiny import tiny_model


class Held:
    """Stands for CUDA graphs, which hold kernels of the process group."""

    def __init__(self, fails: bool = False) -> None:
        self.group_was_there: list[bool] = []
        self._fails = fails

    def close(self) -> None:
        self.group_was_there.append(dist.is_initialized())
        if self._fails:
            raise RuntimeError("a broken device")


def test_resources_are_closed_before_the_process_group() -> None:
    init_world()
    held, dropped = Held(), Held()
    close_with_world(held)
    close_with_world(dropped)
    seen = dropped.group_was_there
    del dropped
    close_world()
    assert held.group_was_there == [True] and not dist.is_initialized()
    assert seen == [], "registration does not keep it alive"
    init_world()
    close_world()
    assert held.group_was_there == [True], "once"


def test_the_group_is_destroyed_even_if_closing_fails() -> None:
    init_world()
    held = Held(fails=True)
    close_with_world(held)
    with pytest.raises(RuntimeError, match="a broken device"):
        close_world()
    assert not dist.is_initialized()


def test_cuda_graphs_of_a_workspace_that_is_still_held_are_released() -> None:
    """As a run with rollout.keep_weights ends, whose engine is in a reference cycle."""
    init_world()
    generation = GenerationEngine.from_model(tiny_model(), stop_token_ids=())
    generation.generate(PROMPTS[:1], SAMPLED)
    workspace, captured = generation.backend.workspace, Held()
    assert workspace is not None
    workspace._graphs = captured  # type: ignore[assignment]
    close_world()
    assert captured.group_was_there == [True] and workspace._graphs is None
    assert torch.is_tensor(workspace.cache.keys)


@pytest.mark.parametrize("own", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", None])
def test_memory_of_a_gpu_expands_unless_the_user_has_set_its_allocator(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of fixed sizes are of no use to a KV cache after training has left them in parts."""
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # what the test sets is undone
        monkeypatch.delenv(name)
    solo_world(torch.device("cpu"))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    if own is not None:
        monkeypatch.setenv(own, "max_split_size_mb:64")
    solo_world(torch.device("cuda", 0))
    found = {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}
    expected = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if own is None else {own: "max_split_size_mb:64"}
    assert found == expected


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with user_error("each rank needs its own GPU, got 2 ranks and 1 visible GPUs on this host"):
        init_world()
