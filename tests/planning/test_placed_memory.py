"""The memory plan of a placement against what its ranks then hold: bytes of live tensors on gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import faults, slow
from tests.support.ranks import run_main
from tests.support.steps import words, write_lines
from tests.support.tiny import tiny_model, tiny_scorer, tiny_tokenizer

PROMPT, NEW = 48, 16
SPLIT = (
    "{sampler: {ranks: 2-3, tensor_parallel: 2}, actor: {ranks: 0-1}, critic: {ranks: 0-1}, critic_copy: {ranks: 2-3, "
    "tensor_parallel: 2}, reference: {ranks: 2-3}, judge: {ranks: 0-3}, teacher: {ranks: 0-1}}"
)
HYBRID = "{actor: {ranks: 0-1}, critic: {ranks: 2}, judge: {ranks: 0}, reference: {ranks: 1-2}, teacher: {ranks: 2}}"
CASES = {
    "separation": (2, "separation", 0),
    "tensor parallel": (4, SPLIT, 0),
    "interleaving": (2, "interleaving", 3),
    "replicated": (2, "interleaving", 0),
    "hybrid": (3, HYBRID, 2),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    # outputs that fill the tiles of packed weights on two ranks too, as those of larger models nearly do
    shape: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 960, "num_hidden_layers": 3, "vocab_size": 4096}
    tiny_model(initializer_range=0.02, **shape).save_pretrained(folder / "model")
    tiny_scorer(**shape).save_pretrained(folder / "judge")
    for name in ("model", "judge"):
        tiny_tokenizer(None).save_pretrained(folder / name)
    rows = [{"prompt": f"{row:0{PROMPT}}"} for row in range(40)]
    write_lines(folder / "rows.jsonl", rows)
    # DeepSpeed's bucket of 2 GB would be all there is to see.
    (folder / "ds.json").write_text('{"zero_optimization": {"reduce_bucket_size": 1000000}}')
    return folder


def phases_of(workspace: Path, output: Path, ranks: int, placement: str, stage: int) -> list[dict[str, Any]]:
    """Planned and measured GiB of two PPO steps, from their report."""
    line = words(
        f"--data.sources {workspace}/rows.jsonl --data.cache_dir {workspace}/cache --data.too_long truncate",
        f"--model.path {workspace}/model --model.dtype float32 --output_dir {output} --logging.sinks []",
        f"--rollout.prompts_per_step 8 --rollout.max_prompt_tokens {PROMPT} --train.max_steps 2",
        f"--rollout.sampling.max_new_tokens {NEW} --train.micro_batch_tokens {4 * (PROMPT + NEW)}",
        f"--teacher.path {workspace}/model" if "teacher" in placement else "",
        f"--deepspeed_config {workspace}/ds.json" if stage else "",
        f"--algorithm.mini_batches 1 --actor.zero.stage {stage} --placement",
        placement,
        "--reward.components",
        f"[{{model: {workspace}/judge, name: judge}}]",
    )
    run_main("tests.distributed.measured", ranks, line)
    found: list[dict[str, Any]] = json.loads((output / "report.json").read_text())["memory"]["phases"]
    return found


@pytest.mark.parametrize("name", [slow("separation"), *map(faults, [*CASES][1:])])
def test_no_rank_holds_more_than_was_planned(name: str, workspace: Path, tmp_path: Path) -> None:
    """By at most 5%; of the ranks that hold the same, the one that takes most."""
    ranks, placement, stage = CASES[name]
    planned: dict[tuple[str, str], float] = {}
    measured: dict[tuple[str, str], float] = {}
    for row in phases_of(workspace, tmp_path / "run", ranks, placement, stage):
        key = row["phase"].split()[-1], row["ranks"]
        planned[key] = max(planned.get(key, 0.0), row["planned_gib"])  # the updates are timed together
        measured[key] = row["measured_gib"]
    assert {phase for phase, _ in planned} == {"generation", "scoring", "training"}
    ratios = {key: planned[key] / measured[key] for key in planned}
    assert all(0.95 <= ratio <= 1.6 for ratio in ratios.values()), ratios
