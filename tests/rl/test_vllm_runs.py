"""Whole runs whose completions come from vLLM servers, here fake ones (tests/vllm has the real ones)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.faults import run_step
from tests.support.ranks import run_main
from tests.support.steps import MODULES, step_line
from tests.support.vllm_server import FakeVLLM, fake_vllm


def urls_of(*servers: FakeVLLM) -> list[str]:
    return ["--rollout.vllm.urls", json.dumps([server.url for server in servers])]


@pytest.mark.slow
def test_ppo_learns_from_the_samples_of_two_servers(model_folder: Path, pair_rows: Path, tmp_path: Path) -> None:
    """With the averaged actor's evaluation, whose weights are loaded too, and the default correction."""
    with fake_vllm(model_folder) as one, fake_vllm(model_folder) as other:
        line = step_line(
            "ppo", tmp_path / "run", model_folder, pair_rows, *urls_of(one, other), "--train.max_steps", "3"
        )
        run_main(MODULES["ppo"], 1, line)
        assert one.bodies and other.bodies
    first, *_, last = [row for row in read_metrics(tmp_path / "run") if "rollout/updates" in row]
    assert last["step"] == 3 and "eval_ema/scores" in last
    assert last["rollout/logprob_abs_diff_mean"] < 1e-4
    assert last["rollout/correction_mean"] == pytest.approx(1.0, abs=1e-3), "corrected, as by default"
    assert first["time/weight_sync_seconds"] >= 0 and last["time/weight_check_seconds"] > 0


@pytest.mark.slow
def test_a_run_streams_from_servers_while_it_trains_on_sharded_weights(
    model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    """Completions that a weight sync interrupts go on; servers are left as they were found."""
    run = tmp_path / "run"
    line = f"--model.path {model_folder} --data.sources {pair_rows} --output_dir {run} --rollout.sampling.n 2 "
    line += "--rollout.prompts_per_step 4 --train.max_steps 4 --algorithm rloo --actor.zero.stage 3 "
    line += "--rollout.sampling.max_new_tokens 12 --rollout.max_lag 2 --reward.components"
    reward = "[{function: 'tests/support/steps.py:brevity'}]"
    with fake_vllm(model_folder, token_seconds=0.01) as one, fake_vllm(model_folder, token_seconds=0.3) as other:
        run_main(MODULES["ppo"], 2, [*line.split(), reward, *urls_of(one, other)])
        assert not one.paused and not other.paused
    rows = [row for row in read_metrics(run) if "rollout/updates" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert 0 < max(row["rollout/stale_updates_max"] for row in rows) <= 2
    assert max(row["rollout/carried_ratio"] for row in rows) > 0


def test_a_run_without_servers_ends_in_one_line(model_folder: Path, pair_rows: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors.txt"
    with fake_vllm(model_folder) as fake:
        fake.intercept = lambda body: None if "prompt_logprobs" in body or len(fake.bodies) < 8 else (0, None)
        line = step_line("ppo", tmp_path / "run", model_folder, pair_rows, *urls_of(fake))
        assert run_step(MODULES["ppo"], 1, line, errors=errors) == [2]
    told = [text for text in errors.read_text().splitlines() if "must answer, all are lost" in text]
    assert len(told) == 1 and fake.url in told[0] and "Traceback" not in errors.read_text()
