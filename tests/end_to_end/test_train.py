"""train.py and the steps as a user runs them, on a tiny model: outputs, messages, skipped and refused steps."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.sections.training import HALVED_FILE
from hybrid_rlhf.runtime.command_line import ERROR_FILE
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.files.names import SAMPLES_FILE
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.output import json_output
from tests.support.commands import CommandLine
from tests.support.faults import run_step
from tests.support.marks import faults
from tests.support.messages import user
from tests.support.ranks import run_main
from tests.support.runs import pipeline_line, rl_line, run_python, sft_line
from tests.support.steps import write_lines

CONTRACT = {
    "step1_sft": ["sft/loss", "sft/perplexity", "eval/loss"],
    "step2_reward": ["reward/loss", "reward/accuracy", "reward/margin", "eval/loss"],
    "step3_ppo": (
        "objective/kl objective/entropy objective/scores objective/rlhf_reward policy/approxkl policy/clipfrac "
        "policy/entropy loss/policy loss/value val/clipfrac val/ratio val/explained_variance completions/mean_length "
        "completions/clipped_ratio rollout/logprob_abs_diff_mean rollout/logprob_abs_diff_max "
        "perf/generation_tokens_per_second time/generation_seconds time/scoring_seconds time/weight_sync_seconds"
    ).split(),
}
ALL_STEPS = ["perf/train_tokens_per_second", "perf/tokens_per_second", "time/training_seconds", "memory/peak_gib", "lr"]
Finished = tuple[Path, list[str], str]
End = Callable[..., tuple[Any, str, str]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, pair_rows: Path) -> Finished:
    """The output folder of one command, the command, and its standard output."""
    output = tmp_path_factory.mktemp("pipeline") / "out"
    line = pipeline_line(output, model_folder, pair_rows)
    done = run_python(line)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return output, line, done.stdout


@pytest.mark.slow
def test_one_command_makes_models_that_the_auto_classes_load(finished: Finished) -> None:
    output = finished[0]
    for name in ("step1_sft", "step3_ppo/actor", "step3_ppo/actor_ema"):
        AutoModelForCausalLM.from_pretrained(output / name)
        assert AutoTokenizer.from_pretrained(output / name).chat_template
    for name in ("step2_reward", "step3_ppo/critic"):
        assert AutoModelForSequenceClassification.from_pretrained(output / name).config.num_labels == 1
    for name in ("step1_sft", "step2_reward", "step3_ppo"):
        assert (output / name / "config.yaml").is_file() and list((output / name / "tensorboard").iterdir())


@pytest.mark.slow
def test_metrics_carry_every_name_from_the_first_step(finished: Finished) -> None:
    for name, wanted in CONTRACT.items():
        lines = read_metrics(finished[0] / name)
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert all("time_seconds" in line for line in lines)
        first = lines[0].keys() | lines[1].keys()
        assert not {*wanted, *ALL_STEPS} - first
    assert lines[1]["val/explained_variance"] == 0, "the last were step 3's, whose critic has a head of zeros"
    samples = read_lines(finished[0] / "step3_ppo" / SAMPLES_FILE)
    places, values = {"step", "index", "group", "prompt_row"}, {"score", "components", "kl", "advantage", "length"}
    assert len(samples) == 8
    assert places | values | {"prompt", "columns", "completion", "stopped", "weight_versions"} == samples[0].keys()


@pytest.mark.slow
def test_the_output_shows_what_changed_and_the_next_command(finished: Finished) -> None:
    output, _, said = finished
    for text in (
        "batch plan: 4 rows per update",
        "What changed",
        "SFT perplexity",
        "reward accuracy",
        "PPO mean score",
    ):
        assert text in said, text
    assert f"python inference/chat.py {output}/step3_ppo/actor" in "".join(said.split("\n"))
    assert "Traceback" not in said and "Warning" not in said
    for name in ("step1_sft", "step2_reward", "step3_ppo"):
        assert "batch plan" in (output / "logs" / f"{name}.log").read_text()


@pytest.mark.slow
def test_finished_steps_are_skipped_and_changed_ones_refused(finished: Finished, cli: CommandLine) -> None:
    output, line, _ = finished
    before = (output / "step1_sft" / "metrics.jsonl").read_bytes()
    pipeline = shlex.join(["train", *line[1:]])
    assert cli(f"{pipeline} --steps sft,reward").out.count("already finished") == 2
    error = cli.refused(f"{pipeline} --steps sft --sft.optimizer.lr 1")
    assert "contains a run with other settings (sft.optimizer.lr)" in error
    assert (output / "step1_sft" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_json_is_all_that_is_on_standard_output(finished: Finished) -> None:
    output, line, _ = finished
    line = ["-m", "hybrid_rlhf", "train", *line[1:], "--json"]
    done = run_python(line)
    assert done.returncode == 0 and "already finished" in done.stderr
    found = json.loads(done.stdout)
    assert found["steps"]["rl"]["finished"] and found["steps"]["rl"]["metrics"]["step"] == 2
    assert found["steps"]["sft"]["output_dir"] == str(output / "step1_sft")
    (perplexity,) = (change for change in found["changes"] if change["metric"] == "SFT perplexity")
    assert perplexity["change"] == pytest.approx(perplexity["after"] / perplexity["before"] - 1)
    assert list(found["models"]) == ["base", "SFT", "PPO"] == list(found["completions"][0])[1:]

    refused = run_python([*line, "--steps", "sft", "--sft.optimizer.lr", "1"])
    assert refused.returncode == 2 and "other settings (sft.optimizer.lr)" in json.loads(refused.stdout)["error"]


def test_a_step_alone_prints_its_last_metrics_as_json(
    tmp_path: Path, model_folder: Path, pair_rows: Path, cli: CommandLine
) -> None:
    words = sft_line(tmp_path / "run", model_folder, pair_rows, "--train.max_steps 1 --json")[1:]
    printed = cli(["sft", *words])
    found = json.loads(printed.out)
    assert found["output_dir"] == str(tmp_path / "run") and found["finished"]
    assert found["metrics"]["step"] == 1 and found["metrics"]["eval/loss"] > 0
    assert "batch plan" in printed.err


@pytest.mark.slow
def test_a_function_and_a_model_make_a_reward(
    finished: Finished, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "rules.py").write_text(
        "def brevity(prompts, completions, **columns):\n"
        "    assert {'chosen', 'rejected'} <= columns.keys() and prompts[0][-1]['role'] == 'user'\n"
        "    return [-float(len(text)) for text in completions]\n"
    )
    config = tmp_path / "ppo.yaml"
    config.write_text(
        "reward:\n  components:\n"
        f"    - {{function: '{tmp_path}/rules.py:brevity', weight: 0.5}}\n"
        f"    - {{name: liked, model: '{finished[0]}/step2_reward'}}\n"
    )
    more = "--algorithm.score_scaling initial --algorithm.penalties.missing_eos 0 --logging.profile_steps [2]"
    line = rl_line(tmp_path / "out", model_folder, pair_rows, more, f"--config {config}")
    run_main("hybrid_rlhf.cli.rl", 1, line[1:])
    metrics = read_metrics(tmp_path / "out")[-1]
    total = 0.5 * metrics["reward/brevity/mean"] + metrics["reward/liked/mean"]
    assert metrics["objective/scores"] == pytest.approx(total, rel=1e-4)
    names = ("generation", "weight_sync", "weight_check", "scoring", "training", "other")
    phases = [metrics[f"time/{name}_seconds"] for name in names]
    assert sum(phases) == pytest.approx(metrics["time/step_seconds"], rel=0.01) and min(phases) >= 0
    assert list((tmp_path / "out" / "profile").glob("step2*.json*")), "a trace of the step"


@pytest.mark.parametrize(
    "start",
    [
        faults(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
        faults(["DEEPSPEED", "--num_gpus", "2", "--no_local_rank"]),
        ["DEEPSPEED", "--num_gpus", "2"],
    ],
    ids=["torchrun", "deepspeed", "deepspeed-local-rank"],
)
@pytest.mark.slow
def test_a_step_runs_under_both_launchers(
    start: list[str], model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    deepspeed = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    line = [*start, *sft_line(tmp_path / "out", model_folder, pair_rows, "--train.max_steps 1")]
    done = run_python([str(deepspeed) if word == "DEEPSPEED" else word for word in line])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "over 2 ranks, micro-batches of" in done.stdout
    assert (tmp_path / "out" / "finished.json").exists()


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> End:
    """The exit code of train.py, and what it prints, where the program of step 1 is replaced by another."""

    def end_of(code: str, *more: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(train, "launcher", lambda options: [sys.executable, "-c", code])
        line = ["--base_model", "M", "--output_dir", str(tmp_path), "--steps", "sft", *more]
        config, steps = train.pipeline(PipelineConfig, line)
        exit_code: Any = 0
        try:
            train.run_step("sft", steps["sft"], config)
        except SystemExit as stopped:
            exit_code = stopped.code
        return exit_code, *capsys.readouterr()

    return end_of


def test_a_mistake_that_a_step_tells_ends_the_pipeline_with_exit_code_2(ended: End, tmp_path: Path) -> None:
    """Whatever the launcher ends with."""
    log = tmp_path / "logs" / "step1_sft.log"
    code = f"import os; open(os.environ['{ERROR_FILE}'], 'x').write('a rule, got 1: fix it'); raise SystemExit(1)"
    exit_code, _, error = ended(code)
    assert (exit_code, error) == (2, "\nerror: step sft: a rule, got 1: fix it\n")
    with json_output():
        exit_code, document, _ = ended(code)
    assert exit_code == 2 and json.loads(document) == {"error": "step sft: a rule, got 1: fix it", "log": str(log)}


def test_a_failing_step_is_reported_with_its_command_first_error_and_last_lines(ended: End, tmp_path: Path) -> None:
    code = "print('error: the first'); print('error: another'); [print(n) for n in range(30)]; raise SystemExit(7)"
    exit_code, _, said = ended(code)
    log = tmp_path / "logs" / "step1_sft.log"
    assert exit_code == 7 and f"error: step sft failed with exit code 7: {sys.executable} -c" in said
    assert f"first error of {log}:\n  error: the first\nlast lines of {log}:\n  10\n" in said


@pytest.mark.parametrize(
    ("says", "code", "starts"),
    [("error: rank 1 (b) died", 70, 3), ("node2: error: a mistake", 2, 1), ("stopped", 143, 1), ("done", 0, 1)],
    ids=["a dead rank", "a mistake", "a stop", "success"],
)
def test_a_step_restarts_only_after_a_fault(says: str, code: int, starts: int, ended: End) -> None:
    line = f"print('started'); print({says!r}); raise SystemExit({code})"
    exit_code, out, error = ended(line, "--launcher.restarts", "2")
    assert exit_code == code and out.splitlines().count("started") == starts
    assert out.count("restart 2 of 2") == (starts == 3)
    assert ("error: step sft: a mistake" in error) == (code == 2), "without the host that pdsh puts before it"


def test_a_step_that_was_out_of_memory_starts_again_once(ended: End, tmp_path: Path) -> None:
    """With the smaller micro-batches that it has left in its folder."""
    folder = tmp_path / "step1_sft"
    line = f"import pathlib; folder = pathlib.Path({str(folder)!r}); folder.mkdir(exist_ok=True); print('started'); "
    line += f"(folder / {HALVED_FILE!r}).write_text('1024'); raise SystemExit(2)"
    exit_code, out, _ = ended(line)
    assert exit_code == 2 and out.splitlines().count("started") == 2
    assert out.count("== sft: starting again with smaller micro-batches") == 1


# tests/fuzz has what each mistake is answered with
@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ("--train.batch 3", "give train.global_batch_size"),
        ("--lora.rank 2 --lora.target_modules [nothing]", "does not fit"),
    ],
    ids=["unknown key", "no target module"],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    more: str, rule: str, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    line = sft_line(tmp_path / "out", model_folder, pair_rows, more)[1:]
    codes = run_step("hybrid_rlhf.cli.sft", 1, line, errors=tmp_path / "stderr.txt")
    said = (tmp_path / "stderr.txt").read_text()
    assert codes == [2], said
    assert rule in said and said.count("\n") == 1 and said.startswith("error: "), said


def test_a_template_of_the_config_is_trained_with_saved_and_stops_answers(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(20)]
    write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role + '|' + m.content + '<|endoftext|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant|' + mood }}{% endif %}"
    )

    def run(folder: str, template: str) -> None:
        more = f"--train.max_steps 1 --data.chat_template {tmp_path}/{template} --data.chat_template_kwargs"
        line = sft_line(tmp_path / folder, model_folder, tmp_path / "rows.jsonl", more, '{"mood": "glad "}')
        run_main("hybrid_rlhf.cli.sft", 1, line[1:])

    run("run", "chat.jinja")
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert saved.apply_chat_template([user("q")], tokenize=False, add_generation_prompt=True).endswith(
        "assistant|glad "
    )
    ends = json.loads((tmp_path / "run" / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {0, 2}, "the template's end of turn beside the tokenizer's eos"
    assert "does not learn to stop" not in (tmp_path / "run" / "log.txt").read_text()
    endless = (tmp_path / "chat.jinja").read_text().replace("<|endoftext|>", "\\n")
    (tmp_path / "endless.jinja").write_text(endless)
    run("endless", "endless.jinja")
    assert "does not learn to stop: set data.chat_template" in (tmp_path / "endless" / "log.txt").read_text()
