"""Runs on rows of which some have images: SFT, preferences, KTO, reward models and distillation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from hybrid_rlhf import SFT
from hybrid_rlhf.data.mismatched import with_mismatched_completions
from hybrid_rlhf.models.pretrained.cards import read_card_metadata
from tests.support.errors import user_error
from tests.support.marks import faults
from tests.support.ranks import run_main
from tests.support.steps import read_rows, step_line, words, write_lines
from tests.support.tiny import save_tiny, tiny_model
from tests.support.vision import build_vision, chat_ids, model_arguments, picture, save_vision

FAMILIES = ["qwen3_vl", "idefics3", faults("gemma3"), faults("llava"), faults("internvl"), faults("qwen3_5")]
SETTINGS = "--train.max_steps 3 --train.global_batch_size 6 --optimizer.lr 1e-3 --data.max_length 400"
SIZES = [(32, 24), (48, 48), (24, 64)]


def pictures(number: int) -> list[Image.Image]:
    """None, one or two."""
    return [picture(10 * number + place, SIZES[(number + place) % 3]) for place in range(number % 3)]


def question(number: int) -> str:
    return f"what is {number}?"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of rows by step, with pictures beside them."""
    folder = tmp_path_factory.mktemp("rows")
    beginnings: list[dict[str, Any]] = []
    for number in range(24):
        names = [f"{number}_{place}.png" for place in range(number % 3)]
        for name, image in zip(names, pictures(number), strict=True):
            image.save(folder / name)
        beginnings.append({"prompt": question(number)} | ({"images": names} if names else {}))
    answers: dict[str, Any] = {
        "sft": lambda number: {"completion": "red " * (1 + number % 3)},
        "pairs": lambda number: {"chosen": "yes, it is", "rejected": "no" * (1 + number % 2)},
        "labels": lambda number: {"completion": "yes" if number % 2 else "no no", "label": bool(number % 2)},
    }
    return {
        name: write_lines(folder / f"{name}.jsonl", [row | more(place) for place, row in enumerate(beginnings)])
        for name, more in answers.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: save_vision(tmp_path_factory.mktemp(family), family, build_vision(family, spread=2.0))
        for family in ("qwen3_vl", "idefics3", "gemma3", "llava", "internvl", "qwen3_5")
    }


def train(name: str, folder: Path, model: Path, rows: Path, *more: str, ranks: int = 1) -> Path:
    output = folder / "run"
    run_main(f"hybrid_rlhf.cli.{name}", ranks, words(*step_line(name, output, model, rows), SETTINGS, *more))
    return output


def losses(output: Path, name: str) -> list[float]:
    return [row[name] for row in read_rows(output / "metrics.jsonl") if name in row]


def transformers_loss(family: str, folder: Path) -> float:
    """Mean negative log-likelihood of the SFT rows, one row at a time, without placeholders among the tokens."""
    lm = AutoModelForImageTextToText.from_pretrained(folder).eval()
    banned = [lm.config.image_token_id if hasattr(lm.config, "image_token_id") else lm.config.image_token_index]
    banned += [lm.config.video_token_id] if getattr(lm.config, "video_token_id", None) else []
    found = []
    for number in range(24):
        images = pictures(number)
        begin = chat_ids(family, [*images, question(number)])
        ids = chat_ids(family, [*images, question(number)], "red " * (1 + number % 3) + "<|im_end|>")
        with torch.no_grad():
            logits = lm(**model_arguments(family, ids, images)).logits[0].index_fill(1, torch.tensor(banned), -1e30)
        logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])
        found.append(logprobs[len(begin) - 1 :])
    return -float(torch.cat(found).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_sft_learns_from_what_transformers_reads(
    family: str, folders: dict[str, Path], rows: dict[str, Path], tmp_path: Path
) -> None:
    """Before the first update the loss is that of transformers; micro-batches do not change it afterwards."""
    more = f"--data.eval_sources {rows['sft']} --data.max_eval_rows 24"
    whole = train("sft", tmp_path / "whole", folders[family], rows["sft"], more, "--train.micro_batch_tokens 4096")
    single = train("sft", tmp_path / "single", folders[family], rows["sft"], more, "--train.micro_batch_size 1")
    assert losses(whole, "eval/loss")[0] == pytest.approx(transformers_loss(family, folders[family]), rel=1e-5)
    for name in ("sft/loss", "eval/loss"):
        assert losses(whole, name) == pytest.approx(losses(single, name), rel=1e-4)
    assert losses(whole, "sft/loss")[-1] < losses(whole, "sft/loss")[0]
    data = json.loads((whole / "report.json").read_text())["data"]
    with_images = sum(bool(pictures(number)) for number in range(data["encoded"]))
    assert data["with_images"] == sum(rows for *_, rows in data["image_tokens"]) == with_images
    assert "<th>with images</th>" in (whole / "report.html").read_text()
    assert read_card_metadata(whole)["pipeline_tag"] == "image-text-to-text"


@pytest.mark.parametrize(
    ("name", "kind", "loss", "options"),
    [
        ("preference", "pairs", "preference/loss", "--reference.logprobs live"),
        ("preference", "pairs", "preference/loss", "--reference.logprobs live --model.vision train"),
        ("preference", "labels", "preference/loss", "--algorithm.name kto"),
        ("reward", "pairs", "reward/loss", ""),
        ("reward", "labels", "reward/loss", "--objective.loss binary"),
    ],
)
def test_micro_batches_ranks_and_stages_do_not_change_a_run(
    name: str, kind: str, loss: str, options: str, folders: dict[str, Path], rows: dict[str, Path], tmp_path: Path
) -> None:
    model = folders["qwen3_vl"]
    whole = train(name, tmp_path / "whole", model, rows[kind], options, "--train.micro_batch_tokens 4096")
    single = train(name, tmp_path / "single", model, rows[kind], options, "--train.micro_batch_size 1")
    sharded = train(name, tmp_path / "sharded", model, rows[kind], options, "--zero.stage 3", ranks=2)
    expected = losses(whole, loss)
    assert losses(single, loss) == pytest.approx(expected, rel=1e-3)
    assert losses(sharded, loss) == pytest.approx(expected, rel=1e-3)
    assert len({round(value, 4) for value in expected}) == 3, "learns nothing"


def test_reference_log_probs_of_rows_with_equal_tokens_are_those_of_their_pictures(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Cached ones are found by their row, live ones computed with it."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(8):
        picture(number, (32, 32)).save(folder / f"{number}.png")
    pairs = write_lines(
        folder / "rows.jsonl",
        [{"prompt": "what?", "images": [f"{n}.png"], "chosen": "yes", "rejected": "no"} for n in range(8)],
    )
    runs = [
        train("preference", tmp_path / how, folders["qwen3_vl"], pairs, f"--reference.logprobs {how}")
        for how in ("live", "cached")
    ]
    live, cached = (losses(run, "preference/loss") for run in runs)
    assert cached == pytest.approx(live, rel=1e-4)
    known = json.loads((runs[1] / "reference_logprobs.json").read_text())["logprobs"]
    assert len({tuple(values) for values in known.values()}) == len(known) > 4


def test_a_mismatched_completion_keeps_the_images_of_its_prompt() -> None:
    """The prompt, whose images are tokens 7, is not cut; a completion that would not fit is."""

    def row(images: Sequence[str], completion: list[int]) -> dict[str, Any]:
        prompt = [1] + [7] * len(images) + [2]
        mask = [False] * len(prompt) + [True] * len(completion)
        return {
            "responses": [prompt + completion],
            "masks": [mask],
            "labels": [True],
            "length": len(mask),
            "tokens": len(mask),
            "images": [{"digest": name} for name in images] or None,
            "image_order": [[*range(len(images))]] if images else None,
            "prompt_images": len(images),
        }

    data = datasets.Dataset.from_list([row("ab", [3, 4]), row("", [5] * 6), row("c", [6])])
    doubled = with_mismatched_completions(data, max_length=9)
    for place in range(3):
        found = doubled[place]
        orders = found["image_order"] or [[], []]
        for ids, mask, order in zip(found["responses"], found["masks"], orders, strict=True):
            assert ids.count(7) == len(order) == data[place]["prompt_images"]
            assert len(ids) == len(mask) <= 9
    assert doubled[0]["responses"][1] == [1, 7, 7, 2, 5, 5, 5, 5, 5]
    assert [image["digest"] for image in doubled[0]["images"]] == ["a", "b"]
    same = [row(name, [place]) for place, name in enumerate("aabba")]
    doubled = with_mismatched_completions(datasets.Dataset.from_list(same), max_length=9)
    answers = [found["responses"][1][-1] for found in doubled]
    assert answers == [2, 2, 4, 4, 2], "questions about different pictures are different prompts"


def test_distillation_from_a_teacher_that_sees_the_pictures(
    folders: dict[str, Path], rows: dict[str, Path], tmp_path: Path
) -> None:
    """A teacher with the student's weights has nothing to teach, with other weights it has."""
    other = save_vision(tmp_path / "other", "qwen3_vl", build_vision("qwen3_vl", spread=1.0))
    found = []
    for place, teacher in enumerate((folders["qwen3_vl"], other)):
        line = f"--distill.teacher {teacher} --distill.sft_coef 0"
        output = train("sft", tmp_path / str(place), folders["qwen3_vl"], rows["sft"], line)
        found.append(losses(output, "distill/divergence")[0])
    assert found[0] == pytest.approx(0.0, abs=1e-5) and found[1] > 0.01


def test_a_student_answers_prompts_with_pictures(
    folders: dict[str, Path], rows: dict[str, Path], tmp_path: Path
) -> None:
    """Of a student with the teacher's weights the divergence is 0 wherever both read the same pictures."""
    line = f"--distill.teacher {folders['qwen3_vl']} --distill.on_policy_fraction 1 --distill.sampling.max_new_tokens 5"
    output = train("sft", tmp_path, folders["qwen3_vl"], rows["sft"], line, "--distill.sft_coef 0")
    assert losses(output, "distill/divergence")[0] == pytest.approx(0.0, abs=1e-5)
    assert losses(output, "distill/on_policy")[0] > 0


def test_a_model_of_text_refuses_images(rows: dict[str, Path], tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", tiny_model())
    with user_error("images need a vision-language model"):
        SFT(model=str(model), data=str(rows["sft"]), output_dir=str(tmp_path / "run")).train()


def test_rows_of_text_need_no_processor(folders: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folders["qwen3_vl"], model)
    for file in model.glob("*processor*"):
        file.unlink()
    text = write_lines(tmp_path / "rows.jsonl", [{"prompt": question(n), "completion": "red"} for n in range(24)])
    assert losses(train("sft", tmp_path, model, text), "sft/loss")
