"""Runs with vLLM itself, of its CPU build (tests/vllm/install.sh): what the fake server of other tests imitates.

They are skipped, with the reason, where its environment is not built.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rlhf.configs.rl import MOST_SERVED_TOKENS, TeacherConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig, VLLMConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.vllm.process import ServerProcess, private_folder, server_command, server_environment
from hybrid_rlhf.engines.vllm.sampler import VLLMSampler
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.backends.vllm import VLLMServer
from hybrid_rlhf.models.policy import Policy, TopTokens
from hybrid_rlhf.rl.rollouts.served_teacher import ServedTeacher
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, differences, train_step
from tests.support.errors import user_error
from tests.support.marks import other_environment
from tests.support.ranks import free_ports, run_main
from tests.support.rl import rollout_of, rollout_of_rows
from tests.support.steps import MODULES, step_line
from tests.support.tiny import save_tiny, tiny_model, tiny_tokenizer

_FOLDER, pytestmark = other_environment("vllm", "vLLM is")
PYTHON = str(_FOLDER / "bin" / "python")
ARGUMENTS = ("--enforce-eager",)
"""Without the compilation of the model, a minute."""
PROMPTS = [[5, 6, 7], [9, 8], [4, 4, 4, 4], list(range(3, 60))]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads of 32: vLLM's attention on a CPU takes no smaller ones."""
    return save_tiny(tmp_path_factory.mktemp("wide"), tiny_model(hidden_size=128))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server on a port, as a user starts it."""
    rollout = RolloutConfig(vllm=VLLMConfig(python=PYTHON, arguments=ARGUMENTS), kv_cache_gib=0.5)
    (port,) = free_ports(1)
    command = server_command(
        PYTHON,
        rollout,
        model=folder,
        socket=folder / "unused",
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranks=1,
    )
    command = [word for word in command if not word.startswith("--uds")]
    command += ["--host=127.0.0.1", f"--port={port}"]
    server = VLLMServer(f"http://127.0.0.1:{port}", "of the test")
    log = private_folder() / "log.txt"
    process = ServerProcess(command, server_environment(os.environ, torch.device("cpu")), log)
    process.wait_ready(server)
    yield server.url
    process.stop()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of other weights, whose head is not tied (docs/vllm.md)."""
    folder = save_tiny(tmp_path_factory.mktemp("other"), tiny_model(1, hidden_size=128, tie_word_embeddings=False))
    with served(folder) as address:
        yield address


def test_greedy_tokens_are_ours_before_and_after_updates(
    world: World, wide_model: Path, url: str, tmp_path: Path
) -> None:
    """And log-probs those of the training forward, of samples at another temperature too."""
    rollout = RolloutConfig(vllm=VLLMConfig(urls=(url,)))
    ours = build_actor(actor_spec(wide_model, lr=0.05), world, rollout=RolloutConfig())
    actor = build_actor(actor_spec(wide_model, lr=0.05), world, rollout=rollout, samples=False)
    sampler = VLLMSampler(actor, tiny_tokenizer(), rollout=rollout, logs=tmp_path)
    stop = (40, 41, 42)
    outputs = []
    for _ in range(3):
        with ours.inference(stop_token_ids=stop) as generation:
            expected = generation.generate(PROMPTS, GREEDY)
        with sampler.inference(stop_token_ids=stop) as generation:
            greedy = generation.generate(PROMPTS, GREEDY)
            sampled = generation.generate(PROMPTS, SamplingParams(max_new_tokens=8, n=3, seed=1))
            again = generation.generate(PROMPTS, SamplingParams(max_new_tokens=8, n=3, seed=1))
            warm = generation.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0.6, seed=1))
        for (mine,), (theirs,) in zip(expected, greedy, strict=True):
            assert mine.token_ids == theirs.token_ids and mine.finish_reason == theirs.finish_reason
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert max(differences(actor, sampled, PROMPTS)) < 1e-4
        tokens = [[completion.token_ids for completion in samples] for samples in sampled]
        assert tokens == [[completion.token_ids for completion in samples] for samples in again], "by their seeds"
        assert len({tuple(ids) for ids in tokens[0]}) == 3
        cooler = [completion for samples in warm for completion in samples]
        assert cooler[0].logprobs != pytest.approx(_raw_logprobs(actor, PROMPTS[0], cooler[0]), abs=1e-2), "processed"
        outputs.append([theirs.token_ids for (theirs,) in greedy])
        train_step(ours, world)
        train_step(actor, world)
    assert outputs[0] != outputs[1] != outputs[2]


def _raw_logprobs(actor: Any, prompt: list[int], completion: Any) -> list[float]:
    ids = torch.tensor([prompt + completion.token_ids])
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        return actor(ids, mask, mask)[0][0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def test_grpo_runs_with_a_server_by_url(wide_model: Path, url: str, pair_rows: Path, tmp_path: Path) -> None:
    """While it samples later rollouts from older weights; a weight sync interrupts what streams."""
    line = [
        *f"--algorithm grpo --model.path {wide_model} --data.sources {pair_rows}".split(),
        *f"--output_dir {tmp_path / 'run'} --rollout.prompts_per_step 4 --rollout.sampling.n 4".split(),
        *"--rollout.sampling.max_new_tokens 64 --rollout.max_lag 2 --train.max_steps 4".split(),
        *("--reward.components", "[{function: 'tests/support/steps.py:brevity'}]"),
        *("--rollout.vllm.urls", json.dumps([url])),
    ]
    run_main(MODULES["ppo"], 1, line)
    last = read_metrics(tmp_path / "run")[-1]
    assert last["step"] == 4 and last["rollout/stale_updates"] > 0


def test_a_teacher_behind_it_is_the_one_of_the_run(wide_model: Path) -> None:
    """Catches what the imitation of other tests does not have: vLLM's routes and the form of its answers, its limit of
    likely tokens, and that the log-probs of prompts are those of the model at temperature 1."""
    tokenizer = tiny_tokenizer()
    real = torch.arange(60) < torch.tensor([60, 2, 31])[:, None]
    mask = real & (torch.arange(60) >= torch.tensor([20, 1, 5])[:, None])
    ids = torch.randint(3, len(tokenizer), real.shape, generator=torch.Generator().manual_seed(1)) * real
    own = Policy(AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32))
    with served(wide_model) as address:
        for k, loss in ((0, "sampled"), (MOST_SERVED_TOKENS, "reverse")):
            teacher = ServedTeacher(TeacherConfig(url=f"{address}/v1", loss=loss, top_k=k), k=k)
            teacher.require_same(tokenizer, longest=255)
            found = teacher(rollout_of(real, mask, input_ids=ids))
            with torch.no_grad():
                expected = own(ids, real, mask, 1.0, **({"top": TopTokens(k, len(tokenizer))} if k else {}))[0]
            expected = expected.view(found.shape)
            (logprobs, tokens), (own_logprobs, own_tokens) = (
                of[mask].split([1 + k, k], dim=-1) for of in (found, expected)
            )
            torch.testing.assert_close(logprobs, own_logprobs, atol=1e-3, rtol=0)
            assert (tokens != own_tokens).sum() <= 0.01 * tokens.numel(), "the same tokens, but for ties"
            assert not found[~mask].any()
        with user_error(f"{address}/v1 must accept what /v1/completions is asked, .* HTTP 400 .*max_tokens must be"):
            teacher(rollout_of_rows([[5] * 256]))  # why require_same asks for room


def own_servers() -> list[psutil.Process]:
    """Running servers that this process has started."""
    children = [child for child in psutil.Process().children() if child.status() != "zombie"]
    return [child for child in children if PYTHON in child.cmdline()[:1]]


def test_ppo_runs_with_a_server_of_its_own(wide_model: Path, pair_rows: Path, tmp_path: Path) -> None:
    """With the averaged actor's evaluation, whose weights are loaded too."""
    arguments = json.dumps(list(ARGUMENTS))
    more = ["--rollout.vllm.python", PYTHON, "--rollout.vllm.arguments", arguments, "--rollout.kv_cache_gib", "0.5"]
    line = step_line("ppo", tmp_path / "run", wide_model, pair_rows, *more, "--train.max_steps 3")
    run_main(MODULES["ppo"], 1, line)
    last = read_metrics(tmp_path / "run")[-1]
    assert last["step"] == 3 and last["rollout/logprob_abs_diff_mean"] < 1e-4 and "eval_ema/scores" in last


def test_a_server_killed_in_a_rollout_is_started_again(world: World, wide_model: Path, tmp_path: Path) -> None:
    """With the weights of now; the requests that were not complete are repeated. No process is left."""
    rollout = RolloutConfig(vllm=VLLMConfig(python=PYTHON, arguments=ARGUMENTS), kv_cache_gib=0.5, max_decode_rows=4)
    actor = build_actor(actor_spec(wide_model, lr=0.05), world, rollout=rollout, samples=False)
    train_step(actor, world)
    sampler = VLLMSampler(actor, tiny_tokenizer(), rollout=rollout, logs=tmp_path)
    killed = list[int]()
    others = {process.pid for process in own_servers()}

    def kill(completed: int) -> None:
        if completed and not killed:
            for process in own_servers():
                if process.pid not in others:
                    process.send_signal(signal.SIGKILL)
                    killed.append(process.pid)

    params = SamplingParams(max_new_tokens=16, n=8, seed=2)
    try:
        with sampler.inference(stop_token_ids=()) as generation:
            completions = generation.generate(PROMPTS, params, on_completed=kill)
    finally:
        sampler.close()
    assert killed and all(len(samples) == 8 for samples in completions)
    assert max(differences(actor, completions, PROMPTS)) < 1e-4
    assert {process.pid for process in own_servers()} == others


def test_a_model_that_vllm_refuses_ends_in_one_line(world: World, wide_model: Path, tmp_path: Path) -> None:
    rollout = RolloutConfig(vllm=VLLMConfig(python=PYTHON, arguments=("--no-such-option",)))
    actor = build_actor(actor_spec(wide_model), world, rollout=rollout, samples=False)
    sampler = VLLMSampler(actor, tiny_tokenizer(), rollout=rollout, logs=tmp_path)
    with pytest.raises(Exception, match=r"did not \(error: unrecognized arguments: --no-such-option\): read"):
        sampler._sync()
