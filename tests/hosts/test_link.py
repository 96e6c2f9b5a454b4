"""The link between hosts: `calibrate` measures it, and the plan of a step across it says what the step takes."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.planning.machines.layers import TimedModel, save_timed_models
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.hosts import HOST_ENVIRONMENT, Host, Network

pytestmark = [pytest.mark.hosts, pytest.mark.faults]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LINKS = {"a bridge": None, "1 Gbit/s and 20 ms": {"delay_ms": 20.0, "mbit": 1000.0}}


@pytest.fixture(scope="module")
def curves(hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home folder with the curves of the first host."""
    home = tmp_path_factory.mktemp("home")
    calibrated(hosts["node1"], home)
    return home


def calibrated(host: Host, home: Path, *more: str) -> str:
    """What `calibrate` of one rank per host says."""
    return command(host, home, "calibrate", "--ranks", "1", *more)


def command(host: Host, home: Path, *words: str) -> str:
    """What a command says; its cache is in a home folder."""
    environment = {**HOST_ENVIRONMENT, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    done = host.run([sys.executable, "-m", "hybrid_rlhf", *words], timeout=600, env=environment)
    assert done.returncode in (0, 1), done.stdout
    return done.stdout


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest, hosts: Network) -> Iterator[str]:
    """The name of a link, which connects the second host."""
    shape: Any = LINKS[request.param]
    with nullcontext() if shape is None else hosts.long_cable("node2", **shape):
        yield request.param


def test_a_step_over_a_measured_link_takes_what_the_plan_says(
    link: str, hosts: Network, curves: Path, tmp_path: Path
) -> None:
    """Before, the plan took the link of a data sheet, and knew of no message but those with weights."""
    host = hosts["node1"]
    hostfile = str(hosts.hostfile())
    calibrated(host, curves, "--hostfile", hostfile)
    save_timed_models(tmp_path, TimedModel(2, 128), template=TEMPLATE)
    rows = [json.dumps({"prompt": f"{place:032}"}) for place in range(16 * 11)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    line = f"--data.sources {tmp_path}/rows.jsonl --steps rl --output_dir {tmp_path}/all --rl.data.eval_fraction 0"
    line += f" --rl.model.path {tmp_path}/actor --rl.reward.components [{tmp_path}/reward] --rl.train.max_steps 10"
    line += " --rl.rollout.prompts_per_step 16 --rl.rollout.kv_cache_gib 0.25 --rl.rollout.max_prompt_tokens 64"
    line += " --rl.rollout.sampling.max_new_tokens 32 --rl.logging.sinks []"
    words = [*line.split(), "--rl.data.cache_dir", str(tmp_path / "cache")]
    command(host, curves, "train", *words, "--launcher.hostfile", hostfile)
    steps = read_metrics(tmp_path / "all" / "step3_ppo")[3:]
    measured = statistics.median(step["time/step_seconds"] for step in steps)
    lengths = statistics.fmean(step["completions/mean_length"] for step in steps)
    plan = ["plan", *words, "--ranks", "2", "--hosts", "2", "--prompt_tokens", "32"]
    said = command(host, curves, *plan, "--completion_tokens", str(lengths), "--json")
    document = json.loads(said.splitlines()[-1])
    predicted = document["rl"]["configured"]["step_seconds"]
    assert document["rl"]["link_source"] == "measured"
    assert predicted == pytest.approx(measured, rel=0.15), (link, document["rl"]["configured"], steps[-1])
