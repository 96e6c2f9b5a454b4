"""Runs started, stopped and resumed from the board; the form of their settings, and its estimate."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.board.processes import estimates, training
from hybrid_rlhf.board.processes.form import check_form, form_fields, read_form
from hybrid_rlhf.board.processes.presets import Presets
from hybrid_rlhf.board.runs.folders import RunFolders
from hybrid_rlhf.board.runs.summary import COMMANDS, RunSummaries
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import build_config, config_tree, flat, plain
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml
from hybrid_rlhf.configs.pipeline import PipelineConfig, step_config
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.board import ServedBoard, hold_lock, served_board, summary_of, write_run
from tests.support.errors import user_error
from tests.support.runs import ROOT
from tests.support.steps import write_rows


def checked(command: str, values: dict[str, Any]) -> dict[str, Any]:
    """A form whose folder may be any."""
    return check_form(command, values, lambda path: None)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBoard]:
    folder = tmp_path_factory.mktemp("board") / "output"
    folder.mkdir()
    with served_board(folder) as served:
        yield served


@pytest.mark.parametrize("command", COMMANDS)
def test_a_form_has_every_key_with_its_default(command: str) -> None:
    fields = {field["key"]: field for field in form_fields(command, None)}
    tree = config_tree(COMMANDS[command])
    assert set(tree.all_keys(off=True)) < set(fields)
    assert all(field["help"] for key, field in fields.items() if not key.endswith(".name"))
    kinds = {"int", "float", "bool", "str", "choice", "list", "yaml", "section"}
    assert {field["type"] for field in fields.values()} <= kinds
    assert {"model.path", "data.sources", "output_dir"} <= {key for key, field in fields.items() if field["required"]}
    shown = {key: fields[key]["default"] for key in tree.all_keys() if fields[key]["default"] not in (None, [], {})}
    form = read_form(command, shown)
    read = flat(plain(form.config))
    assert form.processes == 1 and {key: read[key] for key in shown} == shown


def test_a_form_is_of_an_algorithm() -> None:
    ppo, grpo = ({field["key"] for field in form_fields("rl", name)} for name in ("ppo", "grpo"))
    # The form reads a value at its default as not given: the default is that of a config without a name.
    assert {field["default"] for field in form_fields("rl", "grpo") if field["key"] == "algorithm.name"} == {"ppo"}
    assert "algorithm.name" in ppo & grpo and ppo - grpo and any(key.startswith("critic.") for key in ppo - grpo)
    for command, algorithm in (("rl", "none"), ("none", None)):
        with pytest.raises(UserError):
            form_fields(command, algorithm)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("rm", ["rm"]),
        ("{function: rew.py:score}", [{"function": "rew.py:score"}]),
        ('[{"function": "rew.py:score", "weight": 2}]', [{"function": "rew.py:score", "weight": 2}]),
        ("function: rew.py:score\nweight: 2", [{"function": "rew.py:score", "weight": 2}]),
        (
            "output/rm\n{function: rew.py:score, weight: 0.5}",
            ["output/rm", {"function": "rew.py:score", "weight": 0.5}],
        ),
        ("- output/rm\n- function: rew.py:score", ["output/rm", {"function": "rew.py:score"}]),
        ("", []),
    ],
)
def test_a_list_is_entered_as_yaml_or_an_item_per_line(text: str, items: list[Any]) -> None:
    """`{function: rew.py:score}` was looked up as a repository of the hub."""
    form = read_form("rl", {"reward.components": text})
    assert form.values == {"reward.components": items}
    assert [component.weight for component in form.config.reward.components if not isinstance(component, str)] == [
        item.get("weight", 1.0) for item in items if isinstance(item, dict)
    ]
    sources = read_form("sft", {"data.sources": "a.jsonl\n{path: b.jsonl, weight: 0.5}"}).config.data.sources
    assert sources[0] == "a.jsonl" and (sources[1].path, sources[1].weight) == ("b.jsonl", 0.5)


@pytest.mark.parametrize(
    ("command", "values", "key"),
    [
        ("rl", {"reward.components": "{function: rew.py:score"}, "reward.components"),
        ("rl", {"reward.components": "{weight: 2}"}, "reward.components"),
        ("sft", {"data.sources": "[a, {path: b"}, "data.sources"),
        ("sft", {"data.chat_template_kwargs": "{a: 1, a: 2}"}, "data.chat_template_kwargs"),
        ("sft", {"train.max_steps": "many"}, "train.max_steps"),
        ("sft", {"launcher.num_processes": 0}, "launcher.num_processes"),
        ("sft", {"model": "x", "model.path": "y"}, None),
    ],
)
def test_an_error_names_its_field(command: str, values: dict[str, Any], key: str | None) -> None:
    found = checked(command, values)
    assert found["key"] == key and found["problem"] and found["command"] is None


@pytest.mark.parametrize(
    ("values", "key", "problem"),
    [
        ({"model.path": "./nothing"}, "model.path", "a model must be a folder, a .gguf file or a hub name"),
        ({"reference.path": "./nothing"}, "reference.path", "a model must be a folder"),
        ({"data.sources": "nothing.jsonl"}, "data.sources", "nothing.jsonl does not exist"),
        ({"data.eval_sources": "broken.jsonl"}, "data.eval_sources", "broken.jsonl"),
        ({"reward.components": "{function: absent.py:score}"}, "reward.components", "absent.py"),
        ({"reward.components": "{function: broken.jsonl.py:score}"}, "reward.components", "cannot be parsed"),
        ({"reward.components": "{function: rew.py:scores}"}, "reward.components", "must define scores"),
        ({"reward.components": "{model: ./nothing}"}, "reward.components", "a model must be a folder"),
        ({"output_dir": "taken"}, "output_dir", "output_dir must be new, taken has files"),
        ({"output_dir": "/outside"}, "output_dir", "output_dir must lie in"),
    ],
)
def test_what_a_form_names_is_checked_while_typing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], key: str, problem: str
) -> None:
    """A run would fail with these half a minute later, with its models loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rew.py").write_text("raise SystemExit('it must not be run')\ndef score(): pass\n")
    (tmp_path / "broken.jsonl.py").write_text("def score(:")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    whole = {"model.path": "hub/name", "data.sources": "rows.jsonl", "reward.components": "{function: rew.py:score}"}
    folders = RunFolders([tmp_path])
    good = check_form("rl", {**whole, "output_dir": "new"}, folders.require_new)
    assert good["problem"] is None and good["missing"] == [] and not (tmp_path / "new").exists()
    found = check_form("rl", {**whole, "output_dir": "new", **values}, folders.require_new)
    assert found["key"] == key and problem in found["problem"], found


def test_a_form_says_what_is_missing() -> None:
    assert checked("rl", {})["missing"] == ["model.path", "data.sources", "reward.components"]
    with_environment = {"environment": True, "environment.path": "pkg:Class", "model.path": "m"}
    assert checked("rl", with_environment)["missing"] == ["data.sources"]
    assert checked("sft", {"model.path": "m", "data.sources": "x"})["missing"] == []


def test_the_command_of_a_form_means_the_same_settings() -> None:
    values = {
        "model.path": "my model",
        "data.sources": "a.jsonl\n{path: b's.jsonl, weight: 0.5}",
        "reward.components": "{function: rew.py:score}",
        "algorithm.name": "grpo",
        "algorithm.kl": None,
        "actor.lora": True,
        "actor.lora.rank": 4,
        "data.chat_template_kwargs": "{enable_thinking: false}",
        "train.max_steps": 3,
        "actor.optimizer.betas": "[0.8, 0.9]",
        "output_dir": "output/mine",
    }
    first, *options = checked("rl", values)["command"]
    assert first == "hybrid-rlhf rl" and len(options) == len(values) - 1  # the keys of actor.lora switch it on
    config = parse_config(RLConfig, shlex.split(" ".join(options)))
    assert config == read_form("rl", values).config
    assert config.algorithm.kl is None and config.actor.lora is not None and config.actor.lora.rank == 4
    start = checked("rl", {**values, "launcher.num_processes": 2})["command"][0]
    assert start == "torchrun --standalone --nproc-per-node=2 -m hybrid_rlhf rl"


def test_recipes_and_earlier_runs_are_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe's step and each run as the values of a form, which mean the same settings."""
    monkeypatch.chdir(ROOT)
    run = write_run(
        tmp_path / "output" / "mine",
        steps=1,
        algorithm={"name": "grpo", "kl": None},
        reward={"components": [{"function": "rew.py:score", "weight": 0.5}]},
        actor={"lora": {"rank": 4}},
    )
    folders = RunFolders([tmp_path / "output"])
    presets = Presets(folders, RunSummaries())
    listed = presets.all()
    assert {entry["kind"] for entry in listed} == {"recipe", "run"} and not [e for e in listed if e["problem"]]
    for entry in listed:
        found = presets.values(entry["id"])
        form = read_form(found["command"], found["values"])
        assert found["command"] == entry["command"] and found["note"]
        if entry["kind"] == "run":
            expected: Any = parse_config(RLConfig, ["--config", str(run / "config.yaml")])
            assert found["values"]["reward.components"] == [{"weight": 0.5, "function": "rew.py:score"}]
            assert form.config.output_dir == str(tmp_path / "output" / "mine_2")
        else:
            content = parse_yaml((ROOT / "recipes" / entry["id"].partition(":")[0]).read_text(), "recipe")
            is_step = "base_model" not in content
            expected = (
                build_config(RLConfig, [Layer(content)])
                if is_step
                else step_config(entry["command"], build_config(PipelineConfig, [Layer(content)]))
            )
        assert replace(form.config, output_dir="", resume="auto") == replace(expected, output_dir="", resume="auto")
    for unknown in ("nothing", "../setup.cfg:rl", "llama-3-8b-ppo.yaml:none"):
        with pytest.raises(UserError):
            presets.values(unknown)


def test_a_recipe_that_cannot_be_read_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "broken.yaml").write_text("rl: {algorithm: {name: ppo}\n")
    (tmp_path / "recipes" / "other.yaml").write_text("colour: red\n")
    (tmp_path / "output").mkdir()
    broken, other = Presets(RunFolders([tmp_path / "output"]), RunSummaries()).all()
    assert "broken.yaml:2: not YAML" in broken["problem"] and "no settings of a run" in other["problem"]


def test_an_estimate_of_a_wrong_form_says_what_is_wrong(board: ServedBoard) -> None:
    found = board.post("/api/form/estimate", {"command": "sft", "values": {"model.pth": "x"}}).json()
    assert "model.path" in found["problem"] and found["memory"] == []


@pytest.mark.parametrize(
    ("code", "problem", "memory"),
    [
        ("""print('{"memory": [{"phase": "a", "total": 1073741824, "fits": true}]}')""", None, [("a", 1.0, True)]),
        ("""print('{"error": "no such model"}')""", "no such model", []),
        ("import sys; sys.exit('error: no Python')", "no Python", []),
    ],
)
def test_an_estimate_is_the_result_of_the_command(
    code: str, problem: str | None, memory: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def started(name: str, settings: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
        assert (name, settings["ranks"], settings["sft"]["model"]["path"]) == ("plan", 1, "m")
        yield subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    monkeypatch.setattr(estimates, "json_command", started)
    found = estimates.Estimates().of_form("sft", {"model.path": "m"})
    assert found["problem"] == problem and [tuple(phase.values()) for phase in found["memory"]] == memory


@pytest.mark.slow
def test_a_run_is_started_stopped_and_resumed(board: ServedBoard, model_folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    values = {"model.path": str(model_folder), "data.sources": [str(rows)], "output_dir": "mine"}
    values |= {"train.global_batch_size": 4, "data.max_length": 64, "train.max_steps": 100_000}
    values |= {"data.cache_dir": str(tmp_path / "cache"), "train.epochs": 100_000}
    started = board.post("/api/runs", {"command": "sft", "values": values})
    assert started.status_code == 200, started.text
    run = started.json()["run"]
    try:
        assert board.run("mine")["state"] == "running"
        board.wait("mine", lambda run: run["step"] >= 2)
        assert board.post(f"/api/runs/{run}/resume", {}).status_code == 400
        assert board.post(f"/api/runs/{run}/stop", {}).status_code == 200
        stopped = board.wait("mine", lambda run: run["state"] == "stopped")
        assert stopped["command"] == "sft" and "checkpoints/" in board.get(f"/api/runs/{run}")["files"]
        refused = board.post(f"/api/runs/{run}/stop", {})
        assert refused.status_code == 400 and "does not run" in refused.json()["error"]
        assert board.post(f"/api/runs/{run}/resume", {}).status_code == 200
        board.wait("mine", lambda run: run["step"] > stopped["step"])
        steps = board.get("/api/metrics", run=run, name="train/loss")[run]["step"]
        assert steps == sorted(set(steps))  # no step is repeated
        assert board.post("/api/runs", {"command": "sft", "values": values}).status_code == 400
    finally:
        board.post(f"/api/runs/{run}/stop", {})
        board.wait("mine", lambda run: run["state"] != "running")


def test_a_run_that_cannot_start_shows_its_error(tmp_path: Path) -> None:
    error = "error: a data source must be a file, /no/such/file.jsonl does not exist: check the path"
    (write_run(tmp_path / "broken") / "board.log").write_text(f"loading\n{error}\n")
    summary = summary_of(tmp_path)
    assert (summary["state"], summary["problem"]) == ("broken", error)


def test_a_run_without_a_folder_gets_an_unused_one_of_the_first_folder(tmp_path: Path) -> None:
    """The default output/step3_ppo made output/output/step3_ppo."""
    root = tmp_path / "output"
    root.mkdir()
    runs = training.Training(RunFolders([root]), RunSummaries())
    assert runs.unused_folder("rl") == root / "step3_ppo"
    (root / "step3_ppo").mkdir()
    (root / "step3_ppo_2").touch()
    assert runs.unused_folder("rl") == root / "step3_ppo_3"
    assert runs.unused_folder("sft") == root / "step1_sft"


def test_a_relative_folder_is_read_from_the_working_folder_where_it_lies_below_the_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`output/x` of a board over `output` was output/output/x."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    folders = RunFolders([Path("output")])
    assert folders.place("output/mine") == folders.place("mine") == tmp_path / "output" / "mine"
    assert folders.place("output") == tmp_path / "output" / "output" and folders.place("../mine") is None
    assert folders.shown(tmp_path / "output" / "mine") == "output/mine" and folders.shown(Path("/a")) == "/a"


def stop_only_run(folder: Path) -> None:
    folders = RunFolders([folder])
    training.Training(folders, RunSummaries()).stop(*folders.all())


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with a run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("lock", ["{pid} {host}", "{pid} {host} 1", "{pid} {host} {ticks}"])
@pytest.mark.parametrize("unreadable", [False, True])
def test_stop_signals_no_process_that_is_not_proven_to_hold_the_lock(
    victim: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str, unreadable: bool
) -> None:
    """A stale lock with a reused process id ended an unrelated process where its open files could not be read."""
    folder = write_run(tmp_path / "output" / "stale", steps=1)
    ticks = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (folder / ".lock").write_text(lock.format(pid=victim.pid, host=socket.gethostname(), ticks=ticks) + "\n")
    listed = os.listdir

    def refuse(path: Any) -> list[str]:
        if str(path) == f"/proc/{victim.pid}/fd":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    if unreadable:
        monkeypatch.setattr(os, "listdir", refuse)
    with user_error("stale"):
        stop_only_run(tmp_path / "output")
    with pytest.raises(subprocess.TimeoutExpired):
        victim.wait(0.3)


def test_stop_ends_no_process_of_a_foreign_run(tmp_path: Path) -> None:
    """Its state was not asked: whatever held a file `.lock` there was ended."""
    folder = tmp_path / "output" / "foreign"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("learning_rate: 1\n")
    with hold_lock(folder) as process:
        with user_error("is foreign"):
            stop_only_run(tmp_path / "output")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


def test_stop_ends_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "output" / "live", steps=1)
    with hold_lock(run) as process:
        stop_only_run(tmp_path / "output")
        assert process.wait(60) == 143
        assert summary_of(tmp_path / "output")["state"] == "stopped"


def test_a_run_without_a_checkpoint_resumes_on_as_many_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = list[list[str]]()

    def start(command: list[str], *_: Any, **__: Any) -> subprocess.Popen[bytes]:
        lines.append(command)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(training, "start_process", start)
    folders = RunFolders([tmp_path])
    runs = training.Training(folders, RunSummaries())
    run = folders.get(runs.start("sft", {"model.path": "m", "output_dir": "mine", "launcher.num_processes": 3}))
    runs._processes[run.id].wait()
    training.Training(folders, RunSummaries()).resume(run)  # another board
    assert ["--nproc-per-node=3" in line for line in lines] == [True, True] and "--resume" in lines[1]
    manifest = run.folder / "checkpoints" / "step_00000001" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"content": {"world_size": 2}}')
    assert training.world_size(run.folder) == 2
