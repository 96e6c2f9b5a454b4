"""The training server asked by Tinker's client and its cookbook's training loops, unmodified (tests/tinker/install.sh).

Skipped, with the reason, where their environment is not built. They are Apache-2.0; no code of theirs is here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.marks import other_environment
from tests.support.ranks import free_ports
from tests.support.runs import ROOT
from tests.support.steps import read_rows
from tests.support.training_server import ALICE, SEQUENCE, training_server, training_server_process

_FOLDER, pytestmark = other_environment("tinker", "Tinker's client is")
SWEEP = ROOT / "examples" / "training_server" / "sweep.py"


def started(url: str, script: str, *words: str) -> subprocess.Popen[str]:
    """A script of this folder, or by its path, which runs in the client's environment."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": ALICE,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    line = [str(_FOLDER / "bin" / "python"), "-W", "ignore", str(Path(__file__).parent / script), *words]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(url: str, script: str, *words: str) -> str:
    """The output of such a script."""
    process = started(url, script, *words)
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-3000:]
    return output


def test_two_adapters_learn_their_sequences_at_once_and_sample_them(tmp_path: Path) -> None:
    with training_server(tmp_path, poll_seconds=20) as (url, _):
        result = json.loads(run(url, "two_adapters.py"))
    first, last = result["losses"]
    assert all(after < 0.3 * before for before, after in zip(first, last, strict=True))
    assert result["sampled"] == [[row[1:]] * 2 for row in (SEQUENCE, SEQUENCE[::-1])]
    assert result["base_sampled"][0] != SEQUENCE[1:]
    assert result["logprobs"][0] is None and result["logprobs"][1] < 1e-4, "sampling and training agree"
    run_id = result["paths"][0].split("/")[2]
    assert result["paths"] == [f"tinker://{run_id}/weights/first", f"tinker://{run_id}/sampler_weights/named"]
    assert result["loaded"] == result["named"] == result["sampled"][0]
    assert result["info"] == ["tiny", 4]
    assert set(result["of_losses"]) == {"importance_sampling", "ppo", "cispo", "dro", "gspo"}
    assert "its objective is not published" in result["refused"]
    assert "a backward pass of this step has failed" in result["left_out"], "half a batch is not trained on"
    assert result["custom"][0] == pytest.approx(result["custom"][1], rel=1e-4), "a custom loss runs in the client"
    assert result["many"] == 2100
    assert result["runs"] == 3
    assert result["checkpoints"] == ["sampler_weights/named", "weights/first"] and result["after"] == 1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= result["files"].keys()


@pytest.fixture(scope="module")
def process(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the command in a process; the name of its model is a folder with its tokenizer."""
    with training_server_process(str(model_folder), tmp_path_factory.mktemp("server")) as (_, url):
        yield url


def test_the_supervised_loop_of_the_cookbook(process: str, model_folder: Path, tmp_path: Path) -> None:
    run(process, "cookbook_sft.py", str(model_folder), str(tmp_path))
    losses = [line["train_mean_nll"] for line in read_rows(tmp_path / "metrics.jsonl") if "train_mean_nll" in line]
    assert len(losses) == 10 and losses[-1] < 0.5 * losses[0]
    saved = read_rows(tmp_path / "checkpoints.jsonl")
    assert [line["name"] for line in saved] == ["000004", "000008", "final"]
    assert saved[-1]["state_path"].endswith("/weights/final")


def test_the_rl_loop_of_the_cookbook(process: str, model_folder: Path, tmp_path: Path) -> None:
    run(process, "cookbook_rl.py", str(model_folder), str(tmp_path))
    steps = [line for line in read_rows(tmp_path / "metrics.jsonl") if "env/all/reward/total" in line]
    rewards = [step["env/all/reward/total"] for step in steps]
    assert len(rewards) == 25 and sum(rewards[-6:]) / 6 > sum(rewards[:3]) / 3 + 0.1
    divergences = [abs(step["optim/kl_sample_train_v1"]) for step in steps]
    assert max(divergences) < 1e-3, "sampling and training compute the same policy"


def test_the_example_of_a_sweep_trains_all_runs_at_once(process: str, model_folder: Path) -> None:
    """Their names, a mean reward for each step, and adapters of their own."""
    results = [json.loads(line) for line in run(process, str(SWEEP), str(model_folder)).splitlines()]
    assert [result["run"] for result in results] == ["lr_1e-4", "lr_1e-3", "lr_1e-3_seed_1", "rank_32"]
    assert all(len(result["scores"]) == 2 and 0 <= min(result["scores"]) <= 1 for result in results)
    assert len({result["adapter"] for result in results}) == 4


def test_a_client_samples_on_through_a_kill_of_the_server(model_folder: Path, tmp_path: Path) -> None:
    """Results that are lost with it are answered so that the client sends its requests again."""
    port = free_ports(1)[0]
    with training_server_process(str(model_folder), tmp_path, port=port) as (process, url):
        client = started(url, "through_a_restart.py", str(model_folder), "45")
        assert client.stdout is not None
        assert client.stdout.readline() == "sampling\n"
        time.sleep(2)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    with training_server_process(str(model_folder), tmp_path, port=port):
        output, errors = client.communicate(timeout=300)
    assert client.returncode == 0, errors[-3000:]
    assert output.startswith("done ")
