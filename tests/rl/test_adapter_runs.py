"""Runs that train together on one base: each has the weights, metrics and completions of the run alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from hybrid_rlhf.cli.rl import main
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.liveness.watchdog import EXIT_CODE
from tests.support.faults import Point, intercept, run_step
from tests.support.marks import slow
from tests.support.ranks import run_main, run_mains
from tests.support.runs import ROOT, run_python
from tests.support.steps import brevity, run_outputs, write_rows

MODULE = "hybrid_rlhf.cli.rl"
BREVITY = {"components": [{"function": f"{__file__}:brevity"}]}
LETTERS = {"components": [{"function": f"{__file__}:letters"}]}
RUNS: dict[str, dict[str, Any]] = {
    "narrow": {"actor": {"lora": {"rank": 2}, "optimizer": {"lr": 1e-3}}, "reward": BREVITY, "algorithm.kl": None},
    "wide": {
        "actor.lora": {"rank": 12, "alpha": 6, "target_modules": ["q_proj", "down_proj"]},
        "actor.optimizer": {"lr": 3e-4, "schedule": "linear", "weight_decay": 0.1},
        "reward": LETTERS,
        "seed": 7,
        "algorithm": {"epochs": 2, "entropy_coef": 0.01},
        "rollout.sampling.temperature": 0.7,
        "train.max_steps": 3,
    },
}
"""They differ in adapter, optimizer, reward, seed, number of updates, temperature and number of steps; one has no
reference."""
SPARSE: dict[str, dict[str, Any]] = {
    "sparse": {
        "actor.lora.rank": 4,
        "actor.optimizer.lr": 1e-3,
        "reward": BREVITY,
        "rollout": {"prompts_per_step": 1, "sampling": {"n": 2}},
        "train.max_steps": 4,
    }
}
"""One of two ranks has no prompt, and each has the only row of an update by turns."""
ROUNDING = ("rollout/logprob_abs_diff", "rollout/log_ratio")
__all__ = ["brevity"]


def letters(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    return [len(set(text)) / max(len(text), 1) for text in completions]


def fails(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    raise ValueError("no reward")


def line_of(folder: Path, model: Path, *more: str) -> list[str]:
    rows = write_rows(folder / "rows.jsonl")
    line = f"--algorithm grpo --model.path {model} --data.sources {rows} --data.cache_dir {folder}/cache".split()
    line += "--rollout.prompts_per_step 4 --rollout.sampling.n 4 --rollout.sampling.max_new_tokens 6".split()
    line += "--rollout.max_prompt_tokens 48 --algorithm.mini_batches 2 --data.max_eval_rows 4".split()
    line += "--train.max_steps 2 --train.save_every 1 --train.keep_last 9 --logging.samples_every 1".split()
    return [*line, "--logging.sinks", "[]", *more]


@dataclass(frozen=True)
class FailingRank:
    """An error of one run at an update on one rank; None: the rank dies there."""

    error: Exception | None
    run: str = "narrow"
    update: int = 3
    rank: int | None = 1

    def arm(self) -> None:
        updates = count(1)

        def around(call: int, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
            if arguments[0].name == self.run and next(updates) == self.update:
                if self.error is None:
                    os._exit(9)
                raise self.error
            return run()

        intercept("hybrid_rlhf.engines.adapters.actor:AdapterActor.step", around)


def together(folder: Path, runs: Mapping[str, Any]) -> list[str]:
    """The words of a file with these runs."""
    folder.mkdir(exist_ok=True)
    file = folder / "adapters.yaml"
    file.write_text(yaml.safe_dump(dict(runs)))
    return ["--adapters", str(file), "--output_dir", str(folder)]


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def require_equal(
    run: Path, other: Path, *, steps: int | None = None, within: float = 1e-6, metrics_within: float | None = None
) -> None:
    """The same completions; weights and metrics to 1e-6. Differences between the log-probs of sampler and training are
    rounding themselves."""
    outputs = [run_outputs(path) for path in (run, other)]
    texts = [
        [(sample["step"], sample["completion"]) for sample in map(json.loads, output["samples"])] for output in outputs
    ]
    assert texts[0][-len(texts[1]) :] == texts[1] and texts[1]
    weights = [load_file(path / "actor" / "adapter" / "adapter_model.safetensors") for path in (run, other)]
    assert weights[0].keys() == weights[1].keys()
    assert max(float((value - weights[1][name]).abs().max()) for name, value in weights[0].items()) < within
    within = metrics_within or within
    metrics = [output["metrics"][-(steps or 99) :] for output in outputs]
    for mine, wanted in zip(*metrics, strict=True):
        assert mine.keys() == wanted.keys()
        for key, value in wanted.items():
            assert mine[key] == pytest.approx(value, abs=1e-5 if key.startswith(ROUNDING) else within, rel=within), key


@pytest.fixture(scope="module")
def trained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, trained together."""
    folder = tmp_path_factory.mktemp("together")
    run_main(MODULE, 1, [*line_of(folder, model_folder), *together(folder / "out", RUNS)])
    return folder / "out"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_results_of_the_run_alone(name: str, trained: Path, model_folder: Path, tmp_path: Path) -> None:
    """Whoever its neighbours are: catches rows, requests, random streams, schedules or gradients of one run that reach
    another, and steps that wait for a run that has ended."""
    run_main(MODULE, 1, [*line_of(tmp_path, model_folder), *together(tmp_path / "out", {name: RUNS[name]})])
    require_equal(trained / name, tmp_path / "out" / name)


def test_a_run_is_one_with_lora_alone_and_its_checkpoint_that_of_one(
    trained: Path, model_folder: Path, tmp_path: Path
) -> None:
    """A run of its own, by DeepSpeed and peft, continues from the checkpoint of a run on a shared base."""
    words = ["--actor.lora.rank", "2", "--actor.optimizer.lr", "1e-3", "--reward", json.dumps(BREVITY)]
    words += ["--algorithm.kl", "null", "--output_dir", str(tmp_path / "alone")]
    start = trained / "narrow" / "checkpoints" / "step_1"
    run_main(MODULE, 1, [*line_of(tmp_path, model_folder, *words), "--resume", str(start)])
    require_equal(trained / "narrow", tmp_path / "alone", steps=1)
    assert names_in(tmp_path / "alone") == names_in(trained / "narrow")
    assert names_in(tmp_path / "alone" / "actor") == names_in(trained / "narrow" / "actor")
    merged = [load_file(path / "actor" / "model.safetensors") for path in (trained / "narrow", tmp_path / "alone")]
    assert all(merged[0][name].allclose(value, atol=1e-6) for name, value in merged[1].items())


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_not_a_bit_depends_on_neighbours_if_deterministic(ranks: int, model_folder: Path, tmp_path: Path) -> None:
    line = line_of(tmp_path, model_folder, "--deterministic")
    runs = {"all": RUNS | SPARSE, "one": {"wide": RUNS["wide"]}}
    run_mains(MODULE, ranks, [[*line, *together(tmp_path / name, of_name)] for name, of_name in runs.items()])
    assert run_outputs(tmp_path / "all" / "wide") == run_outputs(tmp_path / "one" / "wide")


@pytest.fixture(scope="module")
def on_ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs on two ranks, trained together in `all` and each alone in a folder of its name."""
    folder = tmp_path_factory.mktemp("ranks")
    line = line_of(folder, model_folder)
    runs = {"all": RUNS | SPARSE, **{name: {name: run} for name, run in (RUNS | SPARSE).items()}}
    run_mains(MODULE, 2, [[*line, *together(folder / name, of_name)] for name, of_name in runs.items()])
    return folder


@pytest.mark.parametrize("name", [*RUNS, *SPARSE])
def test_a_run_on_two_ranks_has_the_results_of_the_run_alone(name: str, on_ranks: Path) -> None:
    """Also where a rank has no prompts, or no rows of an update: catches prompts, rows or gradients that reach another
    run, or are lost, where ranks share them."""
    # without AVX-512, a KL and a gradient norm differ by 1.07e-6
    require_equal(on_ranks / "all" / name, on_ranks / name / name, metrics_within=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_learn_what_one_does(name: str, trained: Path, on_ranks: Path) -> None:
    """And each writes a part of the checkpoints."""
    require_equal(on_ranks / "all" / name, trained / name, within=1e-5)
    files = {file.name for file in (on_ranks / "all" / name / "checkpoints" / "step_2").glob("actor_*")}
    assert files == {"actor_00000.safetensors", "actor_00001.safetensors"}


@pytest.mark.parametrize(
    ("error", "codes", "texts"),
    [
        slow(UserError("no memory"), [2, 2], ["error: 1 of 2 runs have failed, narrow: no memory"]),
        (ValueError("no reason"), [EXIT_CODE, 1], ["ValueError: no reason"]),
        slow(None, [EXIT_CODE, 9], ["error: rank 1 (", "; resume from the last checkpoint"]),
    ],
)
def test_what_fails_on_one_rank_keeps_no_other_waiting(
    error: Exception | None, codes: list[int], texts: list[str], on_ranks: Path, model_folder: Path, tmp_path: Path
) -> None:
    """A run's error on rank 1 ends the run on both, and the others go on with the same results; a rank that dies ends
    the other, and the same command continues the runs, also on one rank."""
    runs = {name: RUNS[name] for name in ("narrow", "wide")}
    line = [*line_of(tmp_path, model_folder), *together(tmp_path / "out", runs)]
    errors = tmp_path / "errors.txt"
    assert run_step(MODULE, 2, line, FailingRank(error), errors=errors) == codes
    text = errors.read_text()
    assert all(part in text for part in texts), text
    assert not (tmp_path / "out" / "narrow" / "finished.json").exists()
    if error is not None:
        require_equal(tmp_path / "out" / "wide", on_ranks / "wide" / "wide")
    run_main(MODULE, 1 if error is None else 2, line)
    require_equal(tmp_path / "out" / "narrow", on_ranks / "narrow" / "narrow", within=1e-6 if error else 1e-5)


@pytest.mark.parametrize("ranks", [slow(2), 1])
def test_a_signal_to_one_rank_stops_all_runs_on_both(
    ranks: int, on_ranks: Path, model_folder: Path, tmp_path: Path
) -> None:
    """Within a step, from which they continue on any number of ranks: catches a choice to stop by a rank's own signals,
    and a checkpoint of one rank's part."""
    line = [*line_of(tmp_path, model_folder), *together(tmp_path / "out", RUNS)]
    point = Point("hybrid_rlhf.engines.adapters.actor:AdapterActor.step", 7, rank=1, signal=signal.SIGTERM)
    assert run_step(MODULE, 2, line, point) == [STOPPED_EXIT_CODE] * 2
    assert list((tmp_path / "out").glob("*/checkpoints/step_*_update_*"))
    run_main(MODULE, ranks, line)
    for name in RUNS:
        require_equal(tmp_path / "out" / name, on_ranks / name / name, within=1e-6 if ranks == 2 else 1e-5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_same_command_continues_the_runs(number: int, trained: Path, model_folder: Path, tmp_path: Path) -> None:
    """Killed, or stopped by a signal, within the second step of both."""
    line = [*line_of(tmp_path, model_folder), *together(tmp_path / "out", RUNS)]
    point = Point("hybrid_rlhf.engines.adapters.actor:AdapterActor.step", 7, signal=number)
    code = -number if number == signal.SIGKILL else STOPPED_EXIT_CODE
    assert run_step(MODULE, 1, line, point) == [code]
    assert not list((tmp_path / "out").glob("*/finished.json"))
    run_main(MODULE, 1, line)
    for name in RUNS:
        log = (tmp_path / "out" / name / "log.txt").read_text()
        other = next(other for other in RUNS if other != name)
        assert f"resumes from {tmp_path}/out/{name}/checkpoints/" in log and f"/{other}/" not in log
        require_equal(tmp_path / "out" / name, trained / name)
    finished = {name: (tmp_path / "out" / name / "metrics.jsonl").stat().st_mtime_ns for name in RUNS}
    run_main(MODULE, 1, line)
    assert finished == {name: (tmp_path / "out" / name / "metrics.jsonl").stat().st_mtime_ns for name in RUNS}


def test_a_run_that_fails_ends_alone(trained: Path, model_folder: Path, tmp_path: Path) -> None:
    """The others go on, with the same results; the command ends with the error."""
    runs = {"faulty": {"reward": {"components": [{"function": f"{__file__}:fails"}]}}, "narrow": RUNS["narrow"]}
    errors = tmp_path / "errors.txt"
    line = [*line_of(tmp_path, model_folder), *together(tmp_path / "out", runs)]
    assert run_step(MODULE, 1, line, errors=errors) == [2]
    text = errors.read_text()
    assert "error: 1 of 2 runs have failed, faulty: reward component fails" in text and "ValueError: no reward" in text
    require_equal(tmp_path / "out" / "narrow", trained / "narrow")
    assert not (tmp_path / "out" / "faulty" / "finished.json").exists()


@pytest.mark.slow
def test_the_example_runs(model_folder: Path, tmp_path: Path) -> None:
    """The command of docs/adapters.md, from a terminal, with its result for programs."""
    folder = "examples/adapters"
    words = ["--config", f"{folder}/config.yaml", f"--adapters={folder}/runs.yaml", "--output_dir", str(tmp_path)]
    words += ["--model.path", str(model_folder), "--data.cache_dir", str(tmp_path / "cache"), "--json"]
    done = run_python(["-m", "hybrid_rlhf", "rl", *words])
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert set(runs) == set(yaml.safe_load((ROOT / folder / "runs.yaml").read_text()))
    assert all(run["finished"] and "loss/policy" in run["metrics"] for run in runs.values())


@pytest.mark.parametrize(
    ("words", "runs", "error"),
    [
        ("--algorithm ppo", {"a": {}}, "runs on one base do not support algorithm ppo, got it in a: give one without"),
        ("", {"a": {"actor.lora": None}}, "do not support actor.lora None, got it in a: leave it out"),
        (
            "--rollout.tensor_parallel 2",
            {"a": {}},
            "a is a run on a base with other runs, got rollout.tensor_parallel 2: leave",
        ),
        (
            "--rollout.streaming.max_lag 1",
            {"a": {}},
            "a is a run on a base with other runs, got the section rollout.streaming: leave",
        ),
        (
            "",
            {"a": {}, "b": {"model.dtype": "bfloat16"}},
            "share model.dtype, got auto in a and bfloat16 in b: give",
        ),
        ("", {"a": {"sed": 1}}, "adapters.yaml: a: unknown key sed: the nearest is seed"),
        ("", {"a": {"output_dir": "x"}}, "the folder of a run is output_dir/NAME, got an output_dir in a"),
        ("", {"../a": {}}, "the name of a run becomes a folder, got '../a': use letters"),
        ("", {"a": 3}, "a run is a mapping of keys, a is 3: write a: {KEY: VALUE}"),
        ("", {}, "--adapters must name a file of runs"),
    ],
)
def test_what_runs_on_one_base_do_not_support_is_refused(
    words: str, runs: dict[str, Any], error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*line_of(tmp_path, tmp_path, *words.split()), *together(tmp_path / "out", runs)])
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2 and error in lines[-1], lines
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
