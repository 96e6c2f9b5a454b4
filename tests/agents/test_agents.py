"""Agent programs as they are, trained through `rollout.endpoint` for two steps (tests/agents/install.sh).

Skipped, with the reason, where their environment is not built.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.ahead import rollout_line
from tests.support.marks import other_environment
from tests.support.ranks import free_ports, run_main
from tests.support.steps import read_rows, write_lines

_FOLDER, pytestmark = other_environment("agents", "agent programs are")


@pytest.mark.parametrize(
    ("agent", "turns", "sequences"), [("mini_swe_agent", 3, 3), ("smolagents", 4, 2), ("openai_agents", 2, 1)]
)
def test_an_agent_learns_the_tokens_that_it_was_given(
    agent: str, turns: int, sequences: int, model_folder: Path, tmp_path: Path
) -> None:
    """The log-probs of all its turns are those of sampling: nothing is tokenized again. They are one sequence, except
    where a program leaves a reply that it cannot read out of its history, or asks for an answer after its last step."""
    if agent == "mini_swe_agent" and shutil.which("bwrap") is None:
        pytest.skip("its commands run in bubblewrap, which is not installed")
    rows = write_lines(tmp_path / "rows.jsonl", ({"prompt": f"What is {number} + 1?"} for number in range(12)))
    (port,) = free_ports(1)
    settings = (
        f"--algorithm grpo --algorithm.kl null --reward.components [] --rollout.endpoint.port {port} "
        "--environment.max_turns 4 --environment.max_turn_tokens 12 --environment.timeout_seconds 300 "
        "--rollout.sampling.n 2 --rollout.max_prompt_tokens 16384 --rollout.sampling.max_new_tokens 4096 "
        "--train.max_steps 2"
    )
    line = rollout_line(tmp_path / "run", model_folder, rows, settings, "--train.eval_every", "0")
    worker = [str(_FOLDER / "bin" / "python"), "-W", "ignore", str(Path(__file__).parent / "worker.py")]
    told = tmp_path / "worker.txt"
    quiet = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with told.open("w") as out:
        words = [*worker, f"http://127.0.0.1:{port}", agent]
        process = subprocess.Popen(words, stdout=out, stderr=out, env=quiet)
    try:
        run_main("hybrid_rlhf.cli.rl", 1, line)
    finally:
        process.kill()
        process.wait()
    steps = [step for step in read_rows(tmp_path / "run" / "metrics.jsonl") if step.get("environment/turns")]
    log = told.read_text()[-3000:]
    assert [step["environment/turns"] for step in steps] == [turns] * 2, log
    assert [step["environment/sequences"] for step in steps] == [sequences] * 2, log
    for step in steps:
        assert step["rollout/logprob_abs_diff_max"] < 1e-3
        assert step["actor/grad_norm"] > 0 and step["environment/reward"] > 0, log
