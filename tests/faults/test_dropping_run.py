"""A complete PPO run on two ranks whose reward fails on some completions: both drop them, no metric counts them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.files.names import METRICS_FILE, SAMPLES_FILE
from tests.support.ranks import run_main


@pytest.mark.parametrize("placement", ["flattening", pytest.param("separation", marks=pytest.mark.faults)])
def test_a_run_continues_without_dropped_completions(
    placement: str, tmp_path: Path, model_folder: Path, write_jsonl: Callable[..., Path]
) -> None:
    rows = write_jsonl([{"prompt": f"{i}+1?", "number": i} for i in range(32)])
    function = tmp_path / "rewards.py"
    function.write_text(
        "def f(prompts, completions, number, **columns):\n"
        "    return [float('nan') if n % 3 == 0 else float(n) for n in number]\n"
    )
    output = tmp_path / "out"
    line = [
        *f"--model.path {model_folder} --data.sources {rows} --data.cache_dir {tmp_path}/cache".split(),
        *"--rollout.prompts_per_step 8 --rollout.sampling.max_new_tokens 6 --rollout.max_prompt_tokens 48".split(),
        *"--train.max_steps 2 --algorithm.mini_batches 4 --algorithm.epochs 2".split(),
        *"--algorithm.penalties.missing_eos 0 --logging.samples_every 1 --logging.tokens false".split(),
        *f"--logging.sinks [] --placement {placement} --output_dir {output}".split(),
        "--reward.components",
        f"[{{function: '{function}:f', on_failure: drop, retries: 0}}]",
    ]
    run_main("hybrid_rlhf.cli.rl", 2, line)
    metrics, samples = (read_lines(output / name) for name in (METRICS_FILE, SAMPLES_FILE))
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for step, row in ((row["step"], row) for row in metrics[1:]):
        assert all(value is not None and math.isfinite(value) for value in row.values()), "nothing is NaN"
        scores = [sample["score"] for sample in samples if sample["step"] == step]
        assert 0 < len(scores) == 8 - row["reward/f/dropped"] < 8
        assert all(score % 3 for score in scores)
        assert math.isclose(row["reward/f/mean"], sum(scores) / len(scores), rel_tol=1e-5)
        assert math.isclose(row["objective/scores"], row["reward/f/mean"], rel_tol=1e-5)
    assert (output / "finished.json").is_file() and not (output / "tokens").exists(), "they are switched off"
