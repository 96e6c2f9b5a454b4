"""Each recipe parses, fits the machine of its header by the planner, and runs two steps on a tiny model."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_rlhf.cli import train
from hybrid_rlhf.cli.machine import plan
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.configs.pipeline import FOLDERS, STEP_NAMES, PipelineConfig, PlanConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from tests.support.clock import wait_until
from tests.support.documents import undocumented_metrics
from tests.support.ranks import run_main
from tests.support.runs import ROOT
from tests.support.shapes import PUBLISHED, write_shape
from tests.support.steps import read_rows, write_lines
from tests.support.tiny import VOCABULARY, save_tiny

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FIELDS = ("machine", "plan", "memory", "time", "start", "expect", "source")
each_recipe = pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
GRPO = "qwen2.5-0.5b-grpo"
RUN = ("qwen2.5-0.5b-sft-dpo", "llama-3-8b-ppo")
"""Recipes that CI runs and plans beside the one that `make test` plans; `make faults` has all."""
ON_TWO_RANKS = ("llama-3.1-8b-sft-32k", "llama-3.1-70b-grpo-lora")
"""Recipes that run on two ranks, with parallelism of two where they have one; the others run on one rank."""
_TINY = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "hidden_size": 32,
    "word_embed_proj_dim": 16,
    "ffn_dim": 48,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def write_tiny(name: str, folder: Path) -> str:
    """A folder with a tiny random model of a published model's family, and a tokenizer of bytes."""
    sizes = {key: _TINY.get(key, value) for key, value in PUBLISHED[name].items()}
    torch.manual_seed(0)
    save_tiny(folder, AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**sizes, **_TOKENS})))
    return str(folder)


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of recipes are those of the checkout."""
    monkeypatch.chdir(ROOT)


def header(file: Path) -> dict[str, str]:
    """The fields of the comment that a recipe begins with, each without further lines."""
    return dict(re.findall(r"^# (\w+): +(.*)$", joined(file), re.MULTILINE))


def joined(file: Path) -> str:
    """The text of a recipe, with each command in its header on one line."""
    return file.read_text().replace(" \\\n#", " ")


def pipeline_keys(file: Path, models: Path, write: Callable[[str, Path], str]) -> dict[str, Any]:
    """A recipe as keys of a pipeline, each model replaced by a folder that `write` makes."""
    content = yaml.safe_load(file.read_text())
    if f"hybrid-rlhf train --config recipes/{file.name}" not in header(file)["start"]:
        content = {"steps": "rl", "rl": content}

    @functools.cache
    def folder(name: str) -> str:
        return write(name, models / name.replace("/", "--"))

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(inner) for key, inner in value.items()}
        return folder(value) if isinstance(value, str) and value in PUBLISHED else value

    found: dict[str, Any] = replaced({key: value for key, value in content.items() if key != "launcher"})
    return found


@each_recipe
def test_a_recipe_says_how_it_is_started_and_parses(file: Path) -> None:
    fields = header(file)
    assert all(fields.get(name) for name in FIELDS), fields
    words = shlex.split(fields["start"])
    assert f"recipes/{file.name}" in words
    if words[:2] == ["hybrid-rlhf", "train"]:
        parse_config(PipelineConfig, words[2:])
    else:
        parse_config(RLConfig, ["--config", str(file)])


def test_recipes_evaluate_what_they_save() -> None:
    found = 0
    for file in RECIPES:
        for line in re.findall(r"hybrid-rlhf evaluate (.*)$", joined(file), re.MULTILINE):
            config = parse_config(EvaluateConfig, shlex.split(line), positional="path")
            assert config.path == f"{run_folder(file)}/actor"
            found += 1
    assert found == 6


def run_folder(file: Path) -> str:
    """Where a recipe of RL writes its run."""
    content = yaml.safe_load(file.read_text())
    return f"{content['output_dir']}/{FOLDERS['rl']}" if "rl" in content else str(content["output_dir"])


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks={GRPO: (), **dict.fromkeys(RUN, pytest.mark.slow)}.get(file.stem, pytest.mark.faults))
        for file in RECIPES
    ],
    ids=lambda file: file.stem,
)
def test_a_recipe_fits_its_machine(file: Path, tmp_path: Path, pair_rows: Path) -> None:
    keys = tmp_path / "recipe.yaml"
    keys.write_text(yaml.safe_dump(pipeline_keys(file, tmp_path, write_shape)))
    given = dict(re.findall(r"--(machine|ranks) ([\w-]+)", header(file)["plan"]))
    line = f"--config {keys} --machine {given['machine']} --ranks {given['ranks']}".split()
    config, steps = train.pipeline(PlanConfig, [*line, *source_words(pair_rows)])
    machine, rank = plan.planned_machine(config)
    planner = plan.planner_of(config, steps, rank)
    steps, _ = plan._sized(planner, {name: steps[name] for name in config.step_names}, machine)
    planned = {name: planner.phases(step) for name, step in steps.items()}
    phases = [phase for of_step in planned.values() for phase in of_step]
    assert all(phase.fits for phase in phases), phases
    most = max(phases, key=lambda phase: phase.total)
    amounts = f"{most.total / 2**30:.1f} of {planner.machine.device_bytes / 2**30:.1f}"
    assert header(file)["memory"] == f"{amounts} GiB per GPU, in {most.name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=() if file.stem in RUN else pytest.mark.faults, id=file.stem) for file in RECIPES],
)
def test_a_recipe_runs(file: Path, tmp_path: Path, pair_rows: Path, world: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    parsed = read_rows(pair_rows)
    write_lines(rows, ({**row, "answer": row["chosen"]} for row in parsed))
    keys = tmp_path / "recipe.yaml"
    keys.write_text(yaml.safe_dump(pipeline_keys(file, tmp_path / "models", write_tiny)))
    config = parse_config(PipelineConfig, ["--config", str(keys)])
    ranks = 2 if file.stem in ON_TWO_RANKS else 1
    config = parse_config(PipelineConfig, ["--config", str(keys), *small_words(config, rows, tmp_path, ranks)])
    for name in config.step_names:
        step = train.step_config(name, config)
        save_config(step, tmp_path / f"{name}.yaml")
        line = ["--config", str(tmp_path / f"{name}.yaml")]
        if ranks == 1:
            import_module(f"hybrid_rlhf.cli.{name}").main(line)
        else:
            run_main(f"hybrid_rlhf.cli.{name}", ranks, line)
        folder = Path(step.output_dir)
        lines = read_rows(folder / "metrics.jsonl")
        assert [line["step"] for line in lines][-2:] == [1, 2]
        assert list(folder.rglob("model.safetensors"))
        assert undocumented_metrics({metric for line in lines for metric in line}) == set()


def source_words(rows: Path) -> list[str]:
    """Options that replace the data of a recipe."""
    return ["--data.sources", str(rows), *(w for name in STEP_NAMES for w in (f"--{name}.data.sources", str(rows)))]


def small_words(config: PipelineConfig, rows: Path, folder: Path, ranks: int) -> list[str]:
    """Options that make two short steps of each step of a recipe, on so many ranks."""
    n = min(config.rl.rollout.sampling.n, 4)
    line = f"--output_dir {folder}/output --rl.rollout.prompts_per_step 4 --rl.rollout.sampling.n {n} "
    line += "--rl.algorithm.mini_batches 2 --rl.rollout.sampling.max_new_tokens 12 --rl.rollout.max_prompt_tokens 300 "
    line += f"--rl.rollout.tensor_parallel {ranks} --rl.rollout.kv_cache_gib 0.1"
    for name in STEP_NAMES:
        line += f" --{name}.data.cache_dir {folder}/cache --{name}.train.max_steps 2 --{name}.data.max_eval_rows 4"
        line += f" --{name}.logging.sinks []"
        if name in config.step_names:
            line += f" --{name}.output_dir {folder}/output/{name}"
        if name != "rl":
            line += f" --{name}.train.global_batch_size 4 --{name}.data.max_length 96"
    if config.rl.environment is not None:
        line += " --rl.environment.max_turn_tokens 4"
    if config.sft.model.sequence_parallel > 1:
        line += f" --sft.model.sequence_parallel {ranks}"
    return [*line.split(), *source_words(rows)]


def test_the_verified_reward_compares_the_last_number() -> None:
    correct = runpy.run_path(str(ROOT / "recipes" / "final_number.py"))["correct"]
    texts = ["2 and 3 are 5", "it is 1,234.0.", "none", "5 or 6", "-4"]
    assert correct([None] * 5, texts, answer=["5", "1234", "5", 5, "-4"], other=[0] * 5) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_gsm8k_becomes_prompts_and_answers() -> None:
    converted = runpy.run_path(str(ROOT / "recipes" / "prepare_gsm8k.py"))["converted"]
    row = converted({"question": "1000+200?", "answer": "1000+200=<<1000+200=1200>>1200\n#### 1,200"})
    assert row["prompt"].startswith("1000+200?\n") and row["answer"] == "1200"


def test_gsm8k_that_is_there_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "source.jsonl", tmp_path / "data" / "rows.jsonl"
    source.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    words = [str(output), "--source", str(source), "--instruction", ""]
    monkeypatch.setattr("sys.argv", ["prepare_gsm8k.py", *words])
    main = runpy.run_path(str(ROOT / "recipes" / "prepare_gsm8k.py"))["main"]
    main()
    assert json.loads(output.read_text()) == {"prompt": "1+1?", "answer": "2"} and not capsys.readouterr().out
    source.write_text("")
    main()
    assert json.loads(output.read_text())["answer"] == "2" and "exists and is kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words", "folder"),
    [
        ("output_dir: runs/a", [], "runs/a"),
        ("output_dir: runs/a#1   # of the team", ["--seed", "1"], "runs/a#1"),
        ("output_dir: 'runs/a b'  # quoted", [], "runs/a b"),
        ('output_dir: "runs/a"', ["--output_dir", "runs/b", "--seed", "1"], "runs/b"),
        ("seed: 1", ["--output_dir=runs/c"], "runs/c"),
    ],
)
def test_slurm_asks_the_rank_of_the_run_folder_for_a_checkpoint(
    line: str, words: list[str], folder: str, tmp_path: Path
) -> None:
    """A stand-in for srun locks the folder as rank 0 does, and ends when it is asked for a checkpoint."""
    config, srun, lock = tmp_path / "step.yaml", tmp_path / "bin" / "srun", tmp_path / folder / ".lock"
    config.write_text(f"{line}\nmodel: {{path: m}}\n")
    srun.parent.mkdir()
    lock.parent.mkdir(parents=True)
    srun.write_text(
        f"#!/bin/bash\ntrap 'exit 7' USR1\necho $$ host > '{lock}.new' && mv '{lock}.new' '{lock}'\n"
        "for i in {1..1200}; do sleep 0.1; done\n"
    )
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "2"}
    command = ["bash", str(ROOT / "recipes" / "cluster" / "slurm.sh"), "rl", str(config), *words]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as job:
        wait_until(lock.exists)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 7


@pytest.mark.parametrize(
    ("ends", "state", "count", "requeued"),
    [
        ("exit 1", "RUNNING", 0, True),
        ("exit 1", "RUNNING", 3, False),
        ("exit 1", "CANCELLED", 0, False),
        ("touch $HYBRID_RLHF_ERROR_FILE; exit 1", "RUNNING", 0, False),
        ("exit 0", "RUNNING", 0, False),
    ],
    ids=["a fault", "the last restart", "scancel", "a user's mistake", "success"],
)
def test_slurm_requeues_a_job_after_a_fault(ends: str, state: str, count: int, requeued: bool, tmp_path: Path) -> None:
    """Stand-ins for Slurm's commands; tests/hosts runs the script on a real cluster, where only root can."""
    (tmp_path / "step.yaml").write_text("output_dir: runs/a\n")
    programs = {"srun": ends, "scontrol": f'[ "$1" = requeue ] && touch {tmp_path}/requeued; echo JobState={state}'}
    for name, content in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{content}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(count)}
    (tmp_path / "slow").write_text("trap 'sleep 0.02' DEBUG\n")  # srun has ended before the script waits for it
    slurm |= {"BASH_ENV": str(tmp_path / "slow"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = {**os.environ, **slurm}
    command = ["bash", str(ROOT / "recipes" / "cluster" / "slurm.sh"), "rl", "step.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (ends == "exit 0"), done.stderr
    assert (tmp_path / "requeued").exists() == requeued, done.stdout + done.stderr


def test_cluster_scripts_parse() -> None:
    for file in (ROOT / "recipes" / "cluster").glob("*.sh"):
        done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
