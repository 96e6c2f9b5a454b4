"""`hybrid-rlhf plan` and `hybrid-rlhf calibrate`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import RolePlacements
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.planning.calibration import Link
from hybrid_rlhf.planning.device import GPU_RESERVE_GIB, Device
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.job import RLJob, read_job
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.step_time import PHASES
from hybrid_rlhf.planning.stored import load_machine, own_machine, save_machine
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from hybrid_rlhf.runtime.placement import Placement, RolePlacement
from tests.support.commands import CommandLine
from tests.support.placement import cpu_machine, machine_file
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a config and no weights."""
    folder = tmp_path_factory.mktemp("shape")
    tiny_config(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=8192
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one_layer(shape: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with one layer, whose memory is measured six times as fast."""
    folder = tmp_path_factory.mktemp("one_layer")
    AutoConfig.from_pretrained(shape, num_hidden_layers=1).save_pretrained(folder)
    return str(folder)


def plan_of(cli: CommandLine, line: str) -> dict[str, Any]:
    """What a plan prints as JSON."""
    found: dict[str, Any] = cli(f"plan {line} --json").result
    return found


def test_a_plan_for_another_machine_needs_a_config_alone(one_layer: str, cli: CommandLine) -> None:
    code, text, _ = cli(f"plan --base_model {one_layer} --machine h100 --ranks 4")
    assert code == 0
    assert "memory plan in GiB per rank: 4 x cuda of 77.10" in text
    assert (
        "placement plan in seconds of an RL step: 4 x h100 on 1 host, speeds of the data sheet; 256 completions" in text
    )
    for style in ("flattening", "interleaving", "separation", "hybrid"):
        assert f"\n{style} " in text
    assert "fits, and is the fastest" in text and "slower" in text and "best plan: " in text
    option = shlex.split(set_with(text))
    given = parse_config(RLConfig, ["--placement", option[1]]).placement
    assert option[0] == "--rl.placement" and isinstance(given, RolePlacements)
    assert {"actor", "critic"} <= {*given.roles} and all(role.ranks for role in given.roles.values())


def test_json_has_plans_with_phases_memory_and_reasons(one_layer: str, cli: CommandLine) -> None:
    line = f"--base_model {one_layer} --steps rl --machine 4090 --ranks 4 --hosts 2"
    found = plan_of(cli, f"{line} --completion_tokens 100 --link_gib_per_second 3")
    assert {each["step"] for each in found["memory"]} == {"rl"}
    rl = found["rl"]
    assert (rl["machine"], rl["source"], rl["ranks"], rl["hosts"]) == ("4090", "data sheet", 4, 2)
    assert rl["link_gib_per_second"] == pytest.approx(3) and rl["link_source"] == "given"
    assert rl["mean_completion_tokens"] == pytest.approx(100, rel=0.01)
    seconds = [each["step_seconds"] for each in rl["plans"] if each["fits"]]
    assert seconds == sorted(seconds) and len(seconds) >= 2
    best = rl["plans"][0]
    assert best["step_seconds"] == pytest.approx(sum(best["phase_seconds"][phase] for phase in PHASES), rel=1e-6)
    assert {"actor", "critic", "reference", "model"} <= set(best["roles"])
    assert all(each["bytes"] <= 21.6 * 2**30 for each in best["memory_bytes"]) and best["why"]


def test_a_teacher_is_planned_as_a_role_and_takes_the_place_of_a_reward_model(one_layer: str, cli: CommandLine) -> None:
    """Catches a teacher that a plan leaves out of the memory, or a reward model that no step would train."""
    line = f"--base_model {one_layer} --steps rl --machine h100 --ranks 2 --rl.algorithm grpo --rl.algorithm.kl null"
    taught = plan_of(cli, f"{line} --rl.teacher.path {one_layer}")["rl"]["plans"]
    judged = plan_of(cli, line)["rl"]["plans"]
    assert {"actor", "teacher"} <= {*taught[0]["roles"]} and "model" not in str(taught)
    assert "teacher" not in str(judged) and "model" in judged[0]["roles"]


def test_candidates_are_listed_fastest_first_with_why_each_lost(one_layer: str, cli: CommandLine) -> None:
    line = f"--base_model {one_layer} --rl.train.micro_batch_tokens 8192 --machine h100 --ranks 4 --candidates 7"
    assert len(re.findall(r"^  \{actor: \{ranks: .*: [\d.]+% slower", cli(f"plan {line}").out, re.MULTILINE)) == 7
    found = plan_of(cli, line)["rl"]
    seconds = [plan["step_seconds"] for plan in found["others"]]
    assert len(seconds) == 7 and seconds == sorted(seconds) and seconds[0] >= found["plans"][0]["step_seconds"]
    assert all(plan["why"] for plan in found["others"])
    known = [plan["roles"] | plan["settings"] for plan in (*found["plans"], *found["others"])]
    assert all(known.count(each) == 1 for each in known)


@pytest.mark.slow
def test_what_does_not_fit_says_where_and_by_how_much(one_layer: str, cli: CommandLine) -> None:
    line = f"plan --base_model {one_layer} --steps rl --machine 4090 --ranks 1"
    code, text, _ = cli(f"{line} --rl.rollout.max_prompt_tokens 1500000 --rl.train.micro_batch_tokens 3000000")
    assert code == 1 and "does not fit by ranks, ZeRO, offloading and micro-batches alone: rank 0, " in text
    assert "rl does not fit as configured (" in text and " of 21.6 GiB" in text


@pytest.mark.faults
def test_the_tables_agree_where_a_setting_that_no_placement_has_makes_room(shape: str, cli: CommandLine) -> None:
    """Checkpointing, which the planner does not choose: "does not fit" followed "it fits with"."""
    line = f"plan --base_model {shape} --steps rl --machine 4090 --ranks 1 --rl.model.gradient_checkpointing false"
    code, text, _ = cli(f"{line} --rl.train.micro_batch_size 64")
    assert code == 1 and "it fits with --rl.model.gradient_checkpointing true" in text
    assert "the plans below have --rl.model.gradient_checkpointing true, without which none fits" in text
    below = text.partition("without which none fits")[2]
    assert "\nflattening " in below and "does not fit" not in below
    code, again, _ = cli(f"{line} {set_with(text)}")
    assert code == 0 and row_of(again, "configured") == row_of(text, "flattening")
    assert "placement" not in text.partition("plan in seconds")[2], "on one rank there is none to choose"


def set_with(text: str) -> str:
    """The options that set the best plan."""
    return text.partition("set it with ")[2].splitlines()[0]


def row_of(text: str, name: str) -> list[str]:
    """Seconds of a plan: of the step, and of each phase."""
    line = next(line for line in text.splitlines() if re.match(rf"{name} +[\d.]+ ", line))
    return line.split()[1 : 2 + len(PHASES)]


@pytest.mark.faults
def test_the_lines_that_are_printed_give_what_they_promise(shape: str, cli: CommandLine) -> None:
    """Flattening with the configured micro-batches does not fit; the best plan does, with its line, and the remedy."""
    line = f"--base_model {shape} --steps rl --machine 4090 --ranks 2"
    line += " --rl.train.micro_batch_tokens 65536 --rl.algorithm.mini_batches 1"
    code, text, _ = cli(f"plan {line}")
    assert code == 1 and "  flattening: does not fit as configured: rank 0, actor training, " in text
    best = re.search(r"rl also fits under the best plan below, (\w+)", text)
    assert best is not None and f"best plan: {best[1]}" in text
    assert "--rl.train.micro_batch_tokens" in set_with(text)
    code, again, _ = cli(f"plan {line} {set_with(text)}")
    assert code == 0 and row_of(again, "configured") == row_of(text, best[1])
    assert f"\n  {best[1]}: fits, and no plan looked at is faster\n" in again, "one name for one plan"
    assert again.endswith("  the settings in use are as fast\n") and "set it with" not in again
    remedy = re.search(r"rl does not fit as configured \(.*actor training.*\): it fits with (--rl[^(,\n]*)", text)
    assert remedy is not None
    code, again, _ = cli(f"plan {line} {remedy[1]}")
    assert code == 0 and "does not fit as configured" not in again
    found = plan_of(cli, f"{line} --rl.placement auto")
    assert found["fits"] and found["rl"]["configured"] is None
    of_best = [each["bytes"] for each in found["rl"]["plans"][0]["memory_bytes"]]
    assert [each["total"] for each in found["memory"]] == of_best


@pytest.mark.parametrize(
    ("given", "style"),
    [
        ("null", "flattening"),
        ("{sampler: {ranks: 3, tensor_parallel: 1}, actor: {ranks: 0-2}}", "separation"),
        ("{style: separation, critic_copy: {tensor_parallel: 1}}", "separation"),
    ],
)
@pytest.mark.faults
def test_the_configured_placement_is_the_first_row(given: str, style: str, shape: str, cli: CommandLine) -> None:
    line = f"--base_model {shape} --steps rl --machine h100 --ranks 4 --rl.placement '{given}'"
    code, text, _ = cli(f"plan {line}")
    lines = text.splitlines()
    row = next(place for place, line in enumerate(lines) if line.startswith("plan  ")) + 1
    assert code == 0 and lines[row].startswith("configured ") and lines[row + 1].startswith(f"  {style}: ")
    found = plan_of(cli, line)
    own = found["rl"]["configured"]
    assert own["style"] == style and own["fits"] and own["why"] in lines[row + 1]
    assert ("step_seconds" in own) == ("critic_copy" not in given), "its time is not predicted"
    ranks = {each["ranks"] for each in found["memory"]}
    apart = {"0-2", "3"} if "0-2" in given else {"0-1", "2-3"}
    assert ranks == ({None} if given == "null" else apart), "the memory is that of the placement, not of flattening"
    peaks = [max(each["total"] for each in found["memory"]), max(each["bytes"] for each in own["memory_bytes"])]
    assert peaks[0] == pytest.approx(peaks[1])


def test_a_wrong_placement_is_one_line_of_a_plan(shape: str, cli: CommandLine) -> None:
    """tests/configs/test_placement.py has the other rules."""
    step = f"--base_model {shape} --rl.placement '{{sampler: {{ranks: 2-3}}, actor: {{ranks: 0-2}}}}' --steps"
    rule = "placement.sampler has ranks of its own, got 2 of the actor's too"
    assert rule in cli.refused(f"plan {step} rl --machine h100 --ranks 4")
    assert rule in cli.refused(f"train {step} reward,rl --launcher.num_processes 4 --output_dir {shape}/none")
    assert not Path(shape, "none").exists(), "no rank has started"


@pytest.mark.faults
def test_larger_micro_batches_are_planned_where_they_are_faster(shape: str, cli: CommandLine) -> None:
    """Small products are slow; a number of rows is kept."""
    line = f"--base_model {shape} --steps rl --machine h100 --ranks 4 --rl.train.micro_batch_"
    by_tokens, by_rows = (plan_of(cli, f"{line}{given}")["rl"] for given in ("tokens 4096", "size 4"))
    best = by_tokens["plans"][0]
    assert best["settings"]["train.micro_batch_tokens"] in (8192, 16384)
    assert best["step_seconds"] < 0.99 * by_tokens["configured"]["step_seconds"]
    assert "train.micro_batch_tokens" not in by_rows["plans"][0]["settings"]


@pytest.mark.parametrize(
    ("step", "kind"), [("sft", SFTConfig), ("reward", RewardConfig), ("preference", PreferenceStepConfig)]
)
def test_one_step_is_planned_by_its_own_line(
    step: str, kind: type, one_layer: str, cli: CommandLine, tmp_path: Path
) -> None:
    """The same numbers as the step has in the pipeline."""
    machine = "--machine 4090 --ranks 2"
    own = f"--data.max_length 300 --zero.stage 2 --model.path {one_layer}"
    found = plan_of(cli, f"{step} {own} {machine}")
    inside = own.replace("--", f"--{step}.")
    whole = plan_of(cli, f"--base_model {one_layer} {inside} --steps {step} {machine}")
    assert found["rl"] is None and found["memory"] == whole["memory"] != []
    file = tmp_path / "step.yaml"
    save_config(parse_config(kind, own.split()), file)
    guessed = plan_of(cli, f"--config {file} {machine}")
    assert guessed == found, "the keys of a whole file say which step it is"


def test_long_searches_say_what_remains_beside_the_result(
    one_layer: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Up to minutes passed without a line."""
    monkeypatch.setattr("hybrid_rlhf.runtime.observability.progress.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("hybrid_rlhf.runtime.observability.progress._GROWTH", 0.0)
    small = machine_file(tmp_path, device_gib=GPU_RESERVE_GIB + 0.4)
    ended = cli(f"plan --base_model {one_layer} --steps rl --machine {small} --ranks 2 --json")
    assert ended.code == 1 and ended.out == f"{json.dumps(ended.result)}\n"
    for what in ("looking for settings that fit, ZeRO 3", "searching placements"):
        assert re.search(rf"^{what}: [\d,]+ of [\d,]+ \w+, .*/s, \d+ s left$", ended.err, re.MULTILINE)


def test_a_section_of_the_launcher_is_an_option_of_the_plan(one_layer: str, cli: CommandLine) -> None:
    own = f"sft --model.path {one_layer} --zero.stage 2"
    section = plan_of(cli, f"{own} --launcher '{{num_processes: 2}}'")
    assert section == plan_of(cli, f"{own} --launcher.num_processes 2") != plan_of(cli, own)


def test_a_step_that_does_not_fit_is_advised_in_its_own_keys(one_layer: str, cli: CommandLine, tmp_path: Path) -> None:
    line = f"sft --model.path {one_layer} --train.micro_batch_tokens 8192 --machine"
    (phase,) = plan_of(cli, f"{line} h100")["memory"]
    device_gib = GPU_RESERVE_GIB + 0.95 * phase["total"] / 2**30
    code, text, _ = cli(f"plan {line} {machine_file(tmp_path, device_gib=device_gib)}")
    assert code == 1 and "sft does not fit as configured (SFT training): it fits with --" in text
    assert "--sft." not in text


def test_without_measurements_the_memory_is_planned_alone(
    one_layer: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hybrid_rlhf.runtime.files.reading.CACHE", str(tmp_path))
    code, text, _ = cli(f"plan --base_model {one_layer}")
    assert code == 0 and "actor training" in text
    assert text.splitlines()[-1].startswith("times are not predicted: run hybrid-rlhf calibrate first")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--base_model {shape} --machine h1000", "--machine must be this (the local machine), b200, h200, h100, "),
        (
            "--base_model {shape} --machine h100 --ranks 3 --hosts 2",
            "ranks must divide into equal hosts, got 3 ranks and 2 hosts",
        ),
        (
            "--base_model {shape} --machine nosuch.yaml",
            "--machine must name a data sheet, nosuch.yaml does not exist",
        ),
        ("--base_model {shape} --ranks 0", "ranks must be 1 or more, got 0"),
        (
            "--base_model {shape} --data.sources nosuch.jsonl",
            "error: step sft: a data source must be a file, a folder or a hub",
        ),
        ("--config {file}", "hybrid-rlhf plan sft --config "),
        ("reward --optimizer.lr 1e-5", "a plan of reward needs a model"),
    ],
)
def test_a_wrong_line_is_one_line(line: str, message: str, shape: str, cli: CommandLine, tmp_path: Path) -> None:
    """Also the file of a step that has the keys of several."""
    file = tmp_path / "step.yaml"
    file.write_text(f"model: {{path: {shape}}}\n")
    assert message in cli.refused(f"plan {line.format(shape=shape, file=file)}")


@pytest.fixture
def job(shape: str) -> RLJob:
    """PPO on GPUs."""
    line = f"--model.path {shape} --reward.components [{shape}] --rollout.kv_cache_gib 1"
    return read_job(parse_config(RLConfig, line.split()), torch.device("cuda"))


def memory_of(job: RLJob, roles: dict[str, RolePlacement]) -> dict[tuple[int, str], MemoryUse]:
    """Of each rank and phase, on four GPUs of 80 GiB."""
    plan = StepPlan(Placement(roles, "separation"))
    phases = MemoryModel(job, Device(job.device, 4, 80 * 2.0**30))(plan).phases
    return {(rank, each.name): each.need for each in phases for rank in each.ranks}


def test_a_separate_sampler_holds_inference_weights_and_no_states(job: RLJob) -> None:
    roles = {name: RolePlacement((0, 1), 2) for name in ("actor", "critic")}
    roles |= {"reference": RolePlacement((2,)), "model": RolePlacement((2, 3), 3)}
    roles["sampler"] = RolePlacement((2, 3), tensor_parallel=2)
    found = memory_of(job, roles)
    trained = {(0, f"{name} training") for name in ("actor", "critic")}
    assert {key for key in found if key[0] == 0} == {(0, "scoring"), *trained}
    assert {key for key in found if key[0] > 1} == {(n, name) for n in (2, 3) for name in ("generation", "scoring")}
    halves = job.actor.sizes.parameters * 2 / 2
    assert found[3, "generation"].inference == pytest.approx(halves, rel=0.01)
    assert 0 < found[3, "generation"].weights < found[2, "generation"].weights
    assert found[2, "scoring"].inference == found[2, "generation"].inference, "they stay for the next rollout"
    assert found[2, "generation"].optimizer == 0 < found[0, "actor training"].optimizer
    copied = memory_of(job, {**roles, "critic_copy": RolePlacement((2, 3), tensor_parallel=2)})
    halves += job.roles["critic"].sizes.parameters * 2 / 2
    for phase in ("generation", "scoring"):
        assert copied[3, phase].inference == pytest.approx(halves, rel=0.01)


@pytest.mark.parametrize("separate", [False, True])
def test_a_judge_in_the_run_is_in_the_memory_of_the_ranks_that_sample(job: RLJob, shape: str, separate: bool) -> None:
    """In all phases, with keys and values in a phase of its own, which leaves those of a sampler alone."""
    roles = {name: RolePlacement((0, 1), 0) for name in ("actor", "critic", "reference", "model")}
    roles |= {"sampler": RolePlacement((2, 3))} if separate else {}
    components = [{"model": shape, "name": "model"}, {"judge": {"path": shape}}]
    reward = replace(job.config.reward, components=[RewardComponentConfig(**part) for part in components])
    config = replace(job.config, reward=reward)
    before = memory_of(job, roles)
    after = memory_of(read_job(config, job.device), roles)
    size = 2 * job.actor.sizes.parameters
    for key, need in before.items():
        samples = (key[0] > 1) == separate
        assert after[key].inference - need.inference == pytest.approx(size * samples, rel=0.01)
        assert after[key].cache == need.cache
    first = 2 if separate else 0
    assert after.keys() - before.keys() == {(first, "judge scoring"), (first + 1, "judge scoring")}
    judging = after[first, "judge scoring"]
    assert judging.buffers > 2**30 and judging.cache == before[first, "scoring" if not separate else "generation"].cache


def test_calibrate_measures_once_and_plan_reads_it(
    one_layer: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the default folder or the one of the run."""
    line = f"calibrate --ranks 2 --cache_dir {tmp_path}"
    measured = cli(line)
    assert "measured in" in measured.out and "\nmeasuring products, memory and launches (2 of 2)\n" in measured.err
    found = load_machine(str(tmp_path))
    assert found is not None and found.measured and found.ranks_per_host == 2 and found.type == "cpu"
    assert 1 < found.link_latency_microseconds < 1e5 and 1e-3 < found.link_gb_per_second < 1000
    assert "this machine is measured" in cli(line).out
    planned = f"plan --base_model {one_layer} --steps rl --ranks 2"
    assert "2 x this CPU on 1 host, speeds measured" in cli(f"{planned} --rl.data.cache_dir {tmp_path}").out
    monkeypatch.setattr("hybrid_rlhf.runtime.files.reading.CACHE", str(tmp_path))
    assert own_machine(str(tmp_path / "none"), torch.device("cpu")) == found
    assert own_machine(None, torch.device("cuda")) is None


def test_calibrate_adds_the_link_between_hosts_to_what_is_stored(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """tests/hosts measures a real one."""
    monkeypatch.setattr("hybrid_rlhf.cli.machine.link.measure_network", lambda hostfile, folder: Link(2.0, 50.0))
    save_machine(cpu_machine(), 2, str(tmp_path))
    line = f"calibrate --ranks 2 --cache_dir {tmp_path}"
    assert cli(f"{line} --hostfile hosts --json").result["measured"]
    found = load_machine(str(tmp_path))
    assert found == cpu_machine().with_measured_network(2.0, 50.0)
    assert "this machine is measured" in cli(line).out
    assert load_machine(str(tmp_path)) == found, "without a hostfile the link stays"


def test_a_setting_that_is_gone_names_its_successor(cli: CommandLine) -> None:
    assert "a calibration takes less than a minute" in cli.refused("calibrate --quick true")
