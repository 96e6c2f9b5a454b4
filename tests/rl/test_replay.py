"""Samples of a recorded step: generated again bit for bit, continued from a token, scored anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from hybrid_rlhf.cli.runs import replay as replay_command
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.rl.replay.recorded import RecordedStep
from hybrid_rlhf.runtime.command_line import save_config
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.observability.token_records import DETAILS, TokenRecords, record_file
from tests.support.ahead import rollout_line
from tests.support.commands import CommandLine
from tests.support.errors import user_error
from tests.support.marks import faults
from tests.support.ranks import run_main
from tests.support.runs import run_python
from tests.support.steps import brevity, step_line, write_lines, write_rows
from tests.support.tiny import tiny_tokenizer

RL, REPLAY = "hybrid_rlhf.cli.rl", "hybrid_rlhf.cli.runs.replay"
LAG = ["--rollout.max_lag", "2"]


@pytest.fixture(scope="module")
def ppo_run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with the checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("ppo")
    line = step_line("ppo", folder / "run", model_folder, write_rows(folder / "rows.jsonl"))
    run_main(RL, 1, line)
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["step_4", "step_6"]
    return folder / "run"


@pytest.fixture
def copied(ppo_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return shutil.copytree(ppo_run, tmp_path / "run")


def replay(folder: Path, step: int, scratch: Path, *more: str, ranks: int = 1) -> Any:
    """The result of the ranks that the command starts."""
    scratch.mkdir()
    run_main(REPLAY, ranks, [str(folder), "--step", str(step), "--scratch", str(scratch), *more])
    return json.loads((scratch / "result.json").read_text())


def replay_samples(folder: Path, step: int, scratch: Path, indices: Sequence[int] = (), ranks: int = 1) -> Any:
    """Two samples of a step at least, or all."""
    return replay(folder, step, scratch, "--index", str([*indices]), ranks=ranks)["samples"]


def content_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file."""
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("step", [2, 5])
def test_a_step_is_generated_again_and_its_run_is_only_read(step: int, ppo_run: Path, tmp_path: Path) -> None:
    """Step 2 from the beginning, because no checkpoint is before it; step 5 from step 4."""
    before = content_of(ppo_run)
    samples = replay_samples(ppo_run, step, tmp_path / "scratch")
    assert content_of(ppo_run) == before
    assert [sample["index"] for sample in samples] == [0, 1, 2, 3]
    for sample, row in zip(samples, RecordedStep.read(ppo_run, step).rows, strict=True):
        assert sample["identical"] and sample["first_difference"] is None and sample["compared"] == "tokens", sample
        assert sample["text"] == row["completion"] and len(sample["token_ids"]) == row["length"]
        assert all(value < 0 for value in sample["logprobs"])
    assert ("resumes from" in (tmp_path / "scratch" / "run" / "log.txt").read_text()) == (step == 5)


def test_a_difference_is_found_at_its_token(copied: Path, tmp_path: Path) -> None:
    file, details = record_file(copied / "tokens", 5), TokenRecords(copied).details(5)
    arrays = load_file(file)
    places = [int(arrays["prompt_lengths"][row]) + 2 for row in (1, 2)]
    arrays["ids"][arrays["offsets"][1] + places[0]] += 1
    arrays["columns.logprobs"][arrays["response_offsets"][2] + 2] += 1e-6
    save_file(arrays, file, metadata={DETAILS: json.dumps(details)})
    samples = replay_samples(copied, 5, tmp_path / "scratch")
    assert [sample["identical"] for sample in samples] == [True, False, False, True]
    assert [sample["first_difference"] for sample in samples] == [None, *places, None]


def test_texts_are_compared_where_tokens_are_missing(copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "tokens")
    rows = read_lines(copied / "samples.jsonl")
    changed = next(row for row in rows if row["step"] == 5 and row["index"] == 1)
    changed["completion"] += "!"
    write_lines(copied / "samples.jsonl", rows)
    same, other = replay_samples(copied, 5, tmp_path / "scratch", [0, 1])
    assert same["identical"] and not other["identical"] and same["compared"] == other["compared"] == "text"
    assert other["first_difference"] == len(changed["completion"]) - 1


@pytest.mark.parametrize(
    ("more", "step", "ranks"),
    [
        (["--algorithm", "grpo", "--rollout.sampling.n", "2", *LAG], 4, 1),
        faults("--algorithm grpo --rollout.sampling.n 2".split(), 3, 2),
        faults("--algorithm dapo --rollout.sampling.n 3".split(), 4, 1),
        faults(["--algorithm", "remax"], 4, 1),
        faults(LAG, 3, 2),
        faults(["--actor.lora.rank", "4"], 4, 1),
    ],
)
def test_other_runs_are_generated_again(
    more: list[str], step: int, ranks: int, stopping_model: Path, tmp_path: Path
) -> None:
    folder, rows = tmp_path / "run", write_rows(tmp_path / "rows.jsonl")
    run_main(RL, ranks, rollout_line(folder, stopping_model, rows, "--logging.samples_every 1", *more))
    samples = replay_samples(folder, step, tmp_path / "scratch", ranks=ranks)
    assert samples and all(sample["identical"] and sample["compared"] == "tokens" for sample in samples), samples


def test_a_branch_from_the_prompt_is_refused_before_a_rank_starts(
    ppo_run: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """The whole step was generated again first."""
    monkeypatch.setattr(replay_command, "tee", lambda *_: pytest.fail("a rank started"))
    record = TokenRecords(ppo_run).read(5, 1)
    first, end = record.prompt_length, len(record.ids)
    for token in (first - 1, end):
        said = cli.refused(f"replay {ppo_run} --step 5 --index 1 --branch.token {token}")
        assert f"branch.token must be in the completion, {first}..{end - 1}, got {token}" in said


def test_a_branch_of_a_run_with_an_environment_is_refused_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(replay_command, "tee", lambda *_: pytest.fail("a rank started"))
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "index": 0}\n')
    save_config(RLConfig(environment=EnvironmentConfig(path="game.py:Game")), tmp_path / "config.yaml")
    said = cli.refused(f"replay {tmp_path} --step 1 --index 0 --branch.token 3")
    assert "a branch continues a completion of one turn, the run has an env" in said


def test_branches_begin_with_the_samples_tokens(ppo_run: Path, tmp_path: Path) -> None:
    record, tokenizer = TokenRecords(ppo_run).read(5, 1), tiny_tokenizer()
    place = record.prompt_length + 2
    asked = f"--index 1 --branch.token {place} --branch.text ab --branch.n 6".split()
    results = [replay(ppo_run, 5, tmp_path / name, *asked) for name in ("one", "two")]
    assert results[0] == results[1] and results[0]["identical"], "branches have random streams of their own"
    branches = results[0]["completions"]
    kept = record.ids[record.prompt_length : place]
    assert len(branches) == 6 and len({tuple(each["token_ids"]) for each in branches}) > 1
    for each in branches:
        ids = each["token_ids"]
        assert ids[:2] == tokenizer("ab")["input_ids"] and each["text"].startswith("ab")
        assert len(kept) + len(ids) <= 5 and each["stopped"] == (ids[-1] == 2)
        whole = tokenizer.decode([*kept, *ids], skip_special_tokens=True)
        assert [*each["components"].values(), each["score"]] == pytest.approx(brevity([], [whole]) * 2, abs=1e-4)
    first, last = record.prompt_length, len(record.ids) - 1
    for token, text, rule in (
        (first - 1, "a", f"must be in the completion, {first}..{last}"),
        (place, "abc", "a completion has at most 5 tokens (rollout.sampling.max_new_tokens), the branch"),
    ):
        with pytest.raises(Exception, match="exit code 2"):
            replay(ppo_run, 5, tmp_path / text, "--index", "1", "--branch.token", str(token), "--branch.text", text)
        assert rule in json.loads((tmp_path / text / "result.json").read_text())["error"]


def test_an_edited_completion_is_scored_as_the_run_would(ppo_run: Path, tmp_path: Path) -> None:
    row = RecordedStep.read(ppo_run, 5).rows[2]
    for number, text in enumerate((row["completion"], "a better answer")):
        found = replay(ppo_run, 5, tmp_path / str(number), "--index", "2", f"--rescore.completion={text}")
        assert list(found["components"]) == list(row["components"])
        assert found["score"] == pytest.approx(brevity([], [text])[0], abs=1e-4)
        assert (found["components"] == row["components"]) == (number == 0)


@pytest.mark.parametrize(
    ("folder", "step", "index", "rule"),
    [
        ("absent", 1, 0, "a replay needs the folder of an RL run with config.yaml and samples.jsonl, .*absent is none"),
        (".", 9, 0, "step must be one that .*samples.jsonl has, got 9: give for example 1 or 2 or 3 or 4 or 5 or 6"),
        (".", 5, 4, "index must be below the 4 samples of step 5, got 4: give another"),
    ],
)
def test_what_is_not_recorded_is_refused(folder: str, step: int, index: int, rule: str, ppo_run: Path) -> None:
    with user_error(rule):
        RecordedStep.read(ppo_run / folder, step).sample(index)


def test_a_damaged_token_record_is_named(copied: Path) -> None:
    record_file(copied / "tokens", 5).write_bytes(b"{}")
    with user_error("is not a token record .* remove it, and the replay compares texts"):
        RecordedStep.read(copied, 5).tokens(0)


@pytest.mark.slow
def test_the_command_prints_what_it_found(ppo_run: Path) -> None:
    done = run_python(f"-m hybrid_rlhf replay {ppo_run} --step 5 --index 3".split())
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("1 of 1 samples of step 5 are identical (tokens and log-probs)\n")
