"""vLLM as the actor's sampler: its weights follow the training, servers start, end and are started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.configs.sections.rollout import RolloutConfig, VLLMConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.vllm import sampler as sampler_module
from hybrid_rlhf.engines.vllm.process import server_command, server_environment
from hybrid_rlhf.engines.vllm.sampler import VLLMSampler
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.runtime.world import World, prepare_device
from tests.support.clock import wait_until
from tests.support.engines import PROMPTS, actor_spec, differences, train_step
from tests.support.errors import user_error
from tests.support.marks import slow
from tests.support.ranks import run_ranks
from tests.support.runs import ENVIRONMENT, ROOT
from tests.support.tiny import tiny_tokenizer
from tests.support.vllm_server import FakeVLLM, fake_python, fake_vllm

SAMPLED = SamplingParams(max_new_tokens=6, seed=3, n=2)
Build = Callable[[RolloutConfig], tuple[HybridEngine, VLLMSampler]]
SYNC = ["/v1/models", "/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


def built(
    world: World, path: Path, folder: Path, rollout: RolloutConfig, **settings: Any
) -> tuple[HybridEngine, VLLMSampler]:
    """An actor and its sampler."""
    actor = build_actor(actor_spec(path, lr=0.05, **settings), world, rollout=rollout, samples=False)
    return actor, VLLMSampler(actor, tiny_tokenizer(), rollout=rollout, logs=folder / "logs")


@pytest.fixture
def build(world: World, model_folder: Path, tmp_path: Path) -> Build:
    return partial(built, world, model_folder, tmp_path)


def by_url(*servers: FakeVLLM, **settings: Any) -> RolloutConfig:
    return RolloutConfig(vllm=VLLMConfig(urls=tuple(server.url for server in servers)), **settings)


def largest_difference(sampler: VLLMSampler, actor: HybridEngine) -> float:
    """Largest difference of sampled log-probs from those of the training forward."""
    with sampler.inference(stop_token_ids=()) as generation:
        completions = generation.generate(PROMPTS, SAMPLED)
        assert generation.weight_version == actor.weight_version
    return max(differences(actor, completions))


def followed(world: World, path: Path, folder: Path, url: str, settings: dict[str, Any]) -> list[float]:
    actor, sampler = built(world, path, folder, RolloutConfig(vllm=VLLMConfig(urls=(url,))), **settings)
    apart = []
    for _ in range(3):
        apart.append(largest_difference(sampler, actor))
        train_step(actor, world)
    return apart


@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, {}), (1, {"lora": 4}), slow(2, {"stage": 3}), slow(2, {"stage": 3, "lora": 4})]
)
def test_samples_are_of_the_weights_that_train(
    ranks: int, settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """Of sharded weights and merged adapters too, on each rank."""
    with fake_vllm(model_folder) as fake:
        for told in run_ranks(followed, ranks, tmp_path, model_folder, tmp_path, fake.url, settings):
            assert max(told) < 1e-4
        syncs = [path for path in fake.calls if path in SYNC]
    assert syncs == SYNC * 3, "rank 0 alone updates the server, in this order"


def test_weights_that_did_not_change_are_not_written_again(build: Build, model_folder: Path) -> None:
    with fake_vllm(model_folder) as fake:
        actor, sampler = build(by_url(fake))
        largest_difference(sampler, actor)
        largest_difference(sampler, actor)
        assert fake.calls.count("/collective_rpc") == 1
        with sampler.other_weights():
            for parameter in actor.lm.parameters():
                parameter.data += 0.01
            assert largest_difference(sampler, actor) < 1e-4, "the averaged actor"
        assert not list(Path(sampler._folder).glob("*.partial"))


def test_a_server_that_differs_is_named_with_the_difference(build: Build, model_folder: Path) -> None:
    with fake_vllm(model_folder) as right, fake_vllm(model_folder, shift=0.5) as wrong:
        _, sampler = build(by_url(right, wrong))
        with user_error(rf"to 0.002 nats, the server {wrong.url} differs by 0.5 after the weight"):
            sampler._sync()


def test_a_lost_server_comes_back_with_the_next_sync(build: Build, model_folder: Path) -> None:
    with fake_vllm(model_folder) as one, fake_vllm(model_folder) as other:
        actor, sampler = build(by_url(one, other))
        one.intercept = lambda body: None if "prompt_logprobs" in body else (0, None)
        assert largest_difference(sampler, actor) < 1e-4
        assert sampler._servers[0].lost is not None
        one.intercept = lambda body: None
        assert largest_difference(sampler, actor) < 1e-4, "with the same weights too"
        assert sampler._servers[0].lost is None
        one.intercept = other.intercept = lambda body: None if "prompt_logprobs" in body else (0, None)
        with user_error("must answer, all are lost") as raised:
            largest_difference(sampler, actor)
        assert "\n" not in str(raised.value) and one.url in str(raised.value) and other.url in str(raised.value)


def test_a_tied_head_is_written_as_a_weight_of_its_own(build: Build, model_folder: Path) -> None:
    """vLLM on a CPU packs a tied head when it starts, and would keep it."""
    with fake_vllm(model_folder) as fake:
        actor, sampler = build(by_url(fake))
        largest_difference(sampler, actor)
        weights = load_file(sampler._folder / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert set(weights) == {*dict(actor.lm.named_parameters()), "lm_head.weight"}


def own(python: Path) -> RolloutConfig:
    return RolloutConfig(vllm=VLLMConfig(python=str(python)))


def children() -> set[int]:
    """Fake servers of this process that are alive."""
    return {
        process.pid
        for process in psutil.Process().children()
        if process.status() != "zombie" and "tests.support.vllm_server" in process.cmdline()
    }


@pytest.mark.slow
def test_a_server_that_dies_in_a_rollout_is_started_again(build: Build, tmp_path: Path) -> None:
    """With the current weights, which are checked, and the same samples."""
    actor, sampler = build(own(fake_python(tmp_path, ends_after=8)))
    before = children()
    try:
        assert largest_difference(sampler, actor) < 1e-4
        train_step(actor, actor.world)
        (first,) = children() - before
        assert largest_difference(sampler, actor) < 1e-4, "killed in this rollout"
        assert (tmp_path / "killed").exists()
        (second,) = children() - before
        assert first != second
    finally:
        sampler.close()
    assert children() == before


def test_a_server_that_does_not_start_is_explained_by_its_log(build: Build, tmp_path: Path) -> None:
    _, sampler = build(own(fake_python(tmp_path, fails="RuntimeError: Unsupported attention: head_dim=8")))
    with user_error("did not .RuntimeError: Unsupported attention: head_dim=8.: read .*rank-0.log"):
        sampler._sync()
    with user_error("must be the interpreter of an environment with vLLM, got .*missing"):
        build(own(tmp_path / "missing"))


PARENT = """
import sys, threading
from pathlib import Path
from hybrid_rlhf.engines.vllm.process import ServerProcess, private_folder
folder = private_folder()
threading.Thread(target=lambda: ServerProcess(["sleep", "600"], {"PATH": "/bin:/usr/bin"}, Path(sys.argv[1]))).start()
print(folder, flush=True)
input()
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_server_and_no_weights(tmp_path: Path) -> None:
    """The thread that started the server may have ended before."""
    line = [sys.executable, "-c", PARENT, str(tmp_path / "log.txt")]
    parent = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert parent.stdout is not None
    folder = Path(parent.stdout.readline().strip())
    started: list[psutil.Process] = []

    def has_server() -> bool:
        started[:] = [child for child in psutil.Process(parent.pid).children() if "600" in child.cmdline()]
        return bool(started)

    wait_until(has_server, "the start of the server")
    assert folder.is_dir() and len(started) == 1
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not started[0].is_running() or started[0].status() == "zombie", "the end of the server")
    wait_until(lambda: not folder.exists(), "the end of the weights")


def test_a_gpu_is_shared_with_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arguments and variables of a server on the rank's GPU, and on a CPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 2**30, 80 * 2**30))
    monkeypatch.setattr(os, "environ", {"PATH": "p"})
    rollout = RolloutConfig(vllm=VLLMConfig(python="python", arguments=("--seed=1",)), cuda_graphs=False)
    device = torch.device("cuda", 1)
    words = partial(
        server_command, "python", model=tmp_path, socket=tmp_path / "s", dtype=torch.bfloat16, device=device, ranks=2
    )
    line = words(rollout)
    assert {"--gpu-memory-utilization=0.450", "--enable-sleep-mode", "--enforce-eager", "--dtype=bfloat16"} <= {*line}
    assert line[-1] == "--seed=1", "the user's come last and so win"
    lagging = RolloutConfig(vllm=VLLMConfig(python="python"), max_lag=1, kv_cache_gib=2.0)
    assert "--enable-sleep-mode" not in words(lagging)
    assert f"--kv-cache-memory-bytes={2 * 2**30}" in words(lagging)
    outer = {"CUDA_VISIBLE_DEVICES": "4,6", "RANK": "1", "MASTER_PORT": "1", "PATH": "p", "PYTHONPATH": "q"}
    kept = server_environment(outer, device)
    assert kept["CUDA_VISIBLE_DEVICES"] == "6" and kept["PATH"] == "p" and kept["VLLM_SERVER_DEV_MODE"] == "1"
    assert not {"RANK", "MASTER_PORT", "PYTHONPATH"} & {*kept}
    prepare_device(device)
    kept = server_environment(os.environ, device)
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "HYBRID_RLHF_ALLOCATOR"} & {*kept}, "vLLM's sleep mode has refused it"
    own = server_environment(dict(os.environ) | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, device)
    assert own["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64", "the user's"
    cpu = words(rollout, device=torch.device("cpu"), unties=True)
    assert '--hf-overrides={"tie_word_embeddings": false}' in cpu and "--enable-sleep-mode" not in cpu
    assert server_environment({}, torch.device("cpu"))["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_weights_that_do_not_fit_into_shared_memory_are_told(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB in a container; the first sync would fail while it writes."""
    monkeypatch.setattr(sampler_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**10))
    with user_error(r"must have room for the weights twice, .* /\w+/?\w* has 0.0 GiB left: give a folder"):
        build(own("python3"))


@pytest.mark.slow
def test_a_colocated_server_sleeps_between_rollouts(build: Build, tmp_path: Path) -> None:
    """On a GPU; here the order of its calls."""
    actor, sampler = build(own(fake_python(tmp_path)))
    sampler._sleeps = True
    calls = list[str]()
    server = sampler._servers[0]
    real = server.call

    def call(method: str, path: str, **arguments: Any) -> Any:
        calls.append(path)
        return real(method, path, **arguments)

    server.call = call  # type: ignore[method-assign]
    try:
        largest_difference(sampler, actor)
        train_step(actor, actor.world)
        largest_difference(sampler, actor)
        assert largest_difference(sampler, actor) < 1e-4, "the same weights, which it has discarded, from the folder"
    finally:
        sampler.close()
    calls = [path for path in calls if path in ("/sleep", "/wake_up", "/pause", "/weight_info")]
    assert calls == ["/weight_info", "/sleep", *["/wake_up", "/pause", "/weight_info", "/sleep"] * 2]
    assert os.path.exists(tmp_path / "logs" / "vllm-rank-0.log")
