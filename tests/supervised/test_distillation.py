"""Distillation and packing as runs of step 1: what they learn, and that no layout of the work changes it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from hybrid_rlhf.cli.sft import main
from hybrid_rlhf.configs.sections.data import RowDataConfig
from hybrid_rlhf.data.packing import pack_rows
from hybrid_rlhf.data.tokenized import load_sft_data
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import derive_seed
from hybrid_rlhf.runtime.world import solo_world
from hybrid_rlhf.supervised.objectives.distillation import DistillObjective, last_completion_start
from tests.support.commands import CommandLine
from tests.support.marks import faults
from tests.support.messages import assistant, user
from tests.support.ranks import run_main
from tests.support.steps import read_rows, words, write_lines
from tests.support.tiny import VOCABULARY, save_tiny, tiny_model, tiny_tokenizer

MODULE = "hybrid_rlhf.cli.sft"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one turn and of more, and plain text; a student, a teacher, one of another vocabulary."""
    folder = tmp_path_factory.mktemp("distillation")
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}+{i % 7}?", "completion": "=" * (1 + i % 5) + str(i + i % 7)} for i in range(30)
    ]
    rows += [{"text": "plain " + "words " * (i % 4)} for i in range(6)]
    turns = [(user, "a"), (assistant, "bc"), (user, "d"), (assistant, "efg")]
    rows += [{"messages": [turn(f"{text}{i}") for turn, text in turns]} for i in range(6)]
    write_lines(folder / "rows.jsonl", rows)
    for seed, name in enumerate(("student", "teacher", "other")):
        tiny_model(seed, tie_word_embeddings=name != "teacher").save_pretrained(folder / name)
        tokenizer = tiny_tokenizer()
        if name == "other":
            tokenizer.add_tokens(["<extra>"])
            tiny_model(seed, vocab_size=300).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def command_line(workspace: Path, name: str, *more: str, steps: int = 1) -> list[str]:
    """Settings of a run by name."""
    line = (
        f"--data.sources {workspace}/rows.jsonl --data.cache_dir {workspace}/cache --model.path {workspace}/student "
        f"--output_dir {workspace}/runs/{name} --data.max_length 96 --data.eval_fraction 0.2 "
        f"--train.global_batch_size 8 --optimizer.lr 1e-3 --optimizer.warmup_fraction 0 --train.max_steps {steps} "
        "--logging.sinks []"
    )
    return words(line, *more)


def launch(workspace: Path, name: str, *more: str, ranks: int = 1, steps: int = 3) -> list[dict[str, Any]]:
    """A run; the lines of its metrics."""
    run_main(MODULE, ranks, command_line(workspace, name, *more, steps=steps))
    return metrics_of(workspace, name)


def metrics_of(workspace: Path, name: str) -> list[dict[str, Any]]:
    return read_rows(workspace / "runs" / name / "metrics.jsonl")


def distil(workspace: Path, line: str = "", teacher: str = "teacher") -> str:
    return f"--distill.teacher {workspace}/{teacher} {line}"


def whole_divergence(student: Any, teacher: Any, rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    """The mean divergence a token with loss, one row at a time, from whole logits."""
    total, count = 0.0, 0
    for row in rows:
        ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["loss_mask"])[1:]
        with torch.no_grad():
            q, p = (lm(ids).logits[0, :-1][mask].double().softmax(-1) for lm in (student, teacher))
        m = (p + q) / 2
        a = {"forward": [(p, q, 1.0)], "jensen_shannon": [(p, m, 0.5), (q, m, 0.5)]}[kind]
        total += sum(share * float((x * (x / y).log()).sum()) for x, y, share in a)
        count += int(mask.sum())
    return total / count


def data_of(workspace: Path, eval_fraction: float) -> RowDataConfig:
    data = {"sources": [str(workspace / "rows.jsonl")], "cache_dir": str(workspace / "cache"), "max_length": 96}
    return RowDataConfig(**data, eval_fraction=eval_fraction)


TOKENIZED: Any = {"tokenizer": tiny_tokenizer(), "seed": 42, "world": solo_world(torch.device("cpu"))}


@pytest.mark.parametrize("kind", ["forward", faults("jensen_shannon")])
def test_the_student_moves_to_the_teacher_on_held_out_rows(kind: str, workspace: Path) -> None:
    lines = launch(workspace, kind, distil(workspace, f"--distill.divergence {kind}"), steps=4)
    held_out = load_sft_data(data_of(workspace, 0.2), **TOKENIZED).held_out
    teacher = AutoModelForCausalLM.from_pretrained(workspace / "teacher")
    for folder, line in ((workspace / "student", lines[0]), (workspace / "runs" / kind, lines[-1])):
        student = AutoModelForCausalLM.from_pretrained(folder)
        expected = whole_divergence(student, teacher, held_out, kind)
        assert line["eval/divergence"] == pytest.approx(expected, rel=1e-4)
        assert line["eval/loss"] == line["eval/divergence"]
        assert line["eval/perplexity"] == pytest.approx(math.exp(line["eval/sft"]))
    assert lines[-1]["eval/divergence"] < 0.95 * lines[0]["eval/divergence"]


def test_temperature_and_the_data_s_answers_are_mixed_in(workspace: Path) -> None:
    options = distil(workspace, "--distill.temperature 2 --distill.sft_coef 0.5")
    lines = launch(workspace, "mixed", options, steps=1)
    for prefix, line in (("eval", lines[0]), ("distill", lines[1])):
        assert line[f"{prefix}/loss"] == pytest.approx(4 * line[f"{prefix}/divergence"] + 0.5 * line[f"{prefix}/sft"])


LAYOUTS = [
    (1, "--train.micro_batch_size 1 --zero.stage 2"),
    (1, "--train.micro_batch_tokens 150 --model.attention eager"),
    (2, "--train.micro_batch_tokens 100 --zero.stage 3"),
]
KINDS = {
    "distill": ("--distill.divergence jensen_shannon --distill.on_policy_fraction 0.5", "distill/loss"),
    "packed": ("--data.packing best_fit --train.global_batch_size 4", "sft/loss"),
    "packed on-policy": (
        "--data.packing best_fit --distill.on_policy_fraction 0.5 --train.global_batch_size 4",
        "distill/loss",
    ),
}


CASES = [("packed", 1), ("distill", 2)]
MORE_CASES = [("distill", 0), ("distill", 1), ("packed", 2), ("packed on-policy", 2)]


@pytest.mark.parametrize(("kind", "layout"), [*CASES, *(faults(*case) for case in MORE_CASES)])
def test_losses_do_not_depend_on_the_layout(kind: str, layout: int, workspace: Path) -> None:
    options, loss = KINDS[kind]
    if loss.startswith("distill"):
        options = distil(workspace, f"{options} --distill.sampling.max_new_tokens 6")
    ranks, line = LAYOUTS[layout]
    name = kind.replace(" ", "-")
    if not (workspace / "runs" / name / "finished.json").exists():
        launch(workspace, name, options)
    expected = metrics_of(workspace, name)
    found = launch(workspace, f"{name}-{layout}", options, line, ranks=ranks)
    for want, got in zip(expected, found, strict=True):
        for key in {loss, "grad_norm", "eval/loss", "distill/on_policy"} & set(want):
            assert got[key] == pytest.approx(want[key], abs=1e-4, rel=1e-4), (want["step"], key)
    if "on_policy_fraction" in options:
        assert {line["distill/on_policy"] for line in expected[1:]} == {0.0, 1.0}, "both kinds of updates"


def test_the_answers_of_on_policy_updates_are_the_student_s(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against the generation engine on the student's weights, prompt by prompt."""
    learned: list[Any] = []
    resample = DistillObjective.resample

    def spy(self: Any, engine: Any, batches: Any, *, step: int) -> Any:
        replaced = resample(self, engine, batches, step=step)
        learned.extend(replaced)
        return replaced

    monkeypatch.setattr(DistillObjective, "resample", spy)
    options = "--distill.on_policy_fraction 1 --distill.sampling.max_new_tokens 5 --train.global_batch_size 32"
    main(command_line(workspace, "sampled", "--data.eval_fraction 0.05", distil(workspace, options)))
    student = GenerationEngine.from_model(
        AutoModelForCausalLM.from_pretrained(workspace / "student"), stop_token_ids=(2,)
    )
    seen = {"conversation": 0, "text": 0, "turns": 0}
    for batch in learned:
        for row, ids, real, mask in zip(
            batch.rows, batch.tokens.input_ids, batch.tokens.attention_mask, batch.tokens.loss_mask, strict=True
        ):
            got = ids[real].tolist()
            begin = last_completion_start(row["loss_mask"])
            if begin == 0:
                assert got == row["input_ids"], "plain text stays as it is"
                seen["text"] += 1
                continue
            params = SamplingParams(max_new_tokens=5, seed=derive_seed(42, 1, row["place"], 0))
            prompt = row["input_ids"][:begin]
            answer = student.generate([prompt], [params])[0][0].token_ids
            assert got == prompt + answer and mask[real].tolist() == [False] * begin + [True] * len(answer)
            seen["turns" if sum(row["loss_mask"][:begin]) else "conversation"] += 1
    assert min(seen.values()) > 0, seen


def test_the_last_answer_is_found() -> None:
    assert last_completion_start([False, True, True, False, False, True, True, False]) == 5
    assert last_completion_start([True, True]) == 0 and last_completion_start([False, False]) == 0


def test_packed_rows_learn_what_their_conversations_do_alone(workspace: Path) -> None:
    """All conversations in one update: the same loss, gradient and weights, packed or not."""
    plain = launch(workspace, "alone", "--data.eval_fraction 0 --train.global_batch_size 42", steps=1)
    rows = packed_rows(workspace)
    options = f"--data.eval_fraction 0 --data.packing best_fit --train.global_batch_size {rows}"
    packed = launch(workspace, "together", options, steps=1)
    for key in ("sft/loss", "grad_norm"):
        assert packed[1][key] == pytest.approx(plain[1][key], rel=1e-6)
    weights = [load_file(workspace / "runs" / name / "model.safetensors") for name in ("alone", "together")]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def packed_rows(workspace: Path) -> int:
    """How many there are of all conversations."""
    data = load_sft_data(data_of(workspace, 0), **TOKENIZED)
    count = len(pack_rows(data.train, capacity=96, seed=42))
    assert 10 < count < 30
    return count


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended(workspace: Path) -> None:
    more = (
        "--distill.on_policy_fraction 0.5 --data.packing best_fit --distill.sampling.max_new_tokens 4 "
        "--train.global_batch_size 3 --train.save_every 1 --train.epochs 2"
    )
    options = distil(workspace, more)
    launch(workspace, "resumed", options)
    folder = workspace / "runs" / "resumed"
    weights = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "step_3")
    (folder / "finished.json").unlink()
    launch(workspace, "resumed", options, "--resume auto")
    assert (folder / "model.safetensors").read_bytes() == weights


def test_rows_beyond_a_table_of_positions_are_refused(workspace: Path, cli: CommandLine) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    save_tiny(workspace / "gpt2", AutoModelForCausalLM.from_config(config))
    ended = cli(["sft", *command_line(workspace, "gpt2", f"--model.path {workspace}/gpt2")])
    assert ended.code == 2 and ended.err.splitlines()[-1] == (
        "error: data.max_length must be at most the 64 positions of the model, got 96: set it to 64"
    )


def test_conditional_runs_keep_their_edges_and_plain_text(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    sequences_of = DistillObjective._sequences

    def spy(self: Any, batch: Any, step: int) -> Any:
        found = sequences_of(self, batch, step)
        asked.append(sum(request is not None for _, request in found))
        return found

    monkeypatch.setattr(DistillObjective, "_sequences", spy)
    rows = workspace / "scored.jsonl"
    write_lines(rows, ({"text": f"plain {n}", "score": n} for n in range(12)))
    more = f"--data.sources {rows} --condition.buckets 3 --distill.on_policy_fraction 1"
    main(command_line(workspace, "told", distil(workspace, more)))
    assert asked and not any(asked)
    told = json.loads((workspace / "runs" / "told" / "condition.json").read_text())
    assert told["texts"] == [f"<score {bucket}/3> " for bucket in (1, 2, 3)] and len(told["edges"]) == 2


def test_a_teacher_must_share_the_student_s_tokens(workspace: Path, cli: CommandLine) -> None:
    ended = cli(["sft", *command_line(workspace, "other", distil(workspace, teacher="other"))])
    assert ended.code == 2 and ended.err.splitlines()[-1] == (
        f"error: the teacher must share the student's tokens, {workspace / 'other'} has a different vocabulary "
        "(260 against 259 tokens): use a model of the student's family"
    )
