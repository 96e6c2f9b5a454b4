"""Images of samples: they tell prompts apart, thumbnails are served, and every file that is not theirs is refused."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from hybrid_rlhf.data.images.reading import image_digest
from hybrid_rlhf.data.images.references import ImageReference, read_reference
from tests.support.board import ServedBoard, append_rows, sample_rows, served_board, workspace_of, write_run
from tests.support.errors import refused
from tests.support.steps import read_rows
from tests.support.vision import picture

CASES = "kept missing changed other link pipe folder damaged nul relative".split()
"""What becomes of the file of each prompt, a group of two samples, after it was recorded."""


def recorded(path: Path, image: Image.Image) -> dict[str, Any]:
    """The image of a line of samples.jsonl; its file has a comment that no thumbnail shows."""
    comment = PngImagePlugin.PngInfo()
    comment.add_text("Comment", "SECRET")
    image.save(path, "PNG", pnginfo=comment)
    read = read_reference(path.name, "image", folder=path.parent, max_pixels=2**20)
    return {"path": read.path, "digest": read.digest, "width": read.width, "height": read.height}


def huge(image: dict[str, Any]) -> dict[str, Any]:
    """Said to be scaled to more pixels than any memory has, by who has its file."""
    size = 10**9, 10**9
    digest = image_digest(Path(image["path"]).read_bytes(), size)
    return image | {"width": size[0], "height": size[1], "digest": digest}


def write_samples(folder: Path) -> dict[str, dict[str, Any]]:
    """A run whose prompts have the same text and different images, by case, and afterwards broken ones."""
    files = folder / "files"
    files.mkdir(parents=True)
    images = {case: recorded(files / f"{case}.png", picture(seed, (600, 300))) for seed, case in enumerate(CASES)}
    run = write_run(folder / "output" / "one", steps=1)
    rows = sample_rows(1, 2 * len(CASES), group=2)
    for number, row in enumerate(rows):
        row["prompt"] = [{"role": "user", "content": "what is <image>"}]
        row["images"] = [images[CASES[number // 2]]]
    images["shown"] = recorded(files / "shown.png", picture(50, (300, 600)))
    rows[1]["shown_images"] = [images["shown"]]
    rows[CASES.index("nul") * 2]["images"][0]["path"] += "\0"
    rows[CASES.index("relative") * 2]["images"][0]["path"] = "files/relative.png"
    rows[CASES.index("other") * 2]["images"][0]["path"] = images["kept"]["path"]
    append_rows(run, rows)
    append_rows(run, [row | {"step": 2, "images": 7} for row in rows[:1]])
    broken = [None, {"digest": 7}, images["kept"] | {"width": 0}, images["kept"] | {"height": "9"}]
    append_rows(run, [row | {"step": 2, "index": 1, "images": broken} for row in rows[:1]])
    append_rows(run, [row | {"step": 2, "index": 2, "images": [huge(images["kept"])]} for row in rows[:1]])
    (files / "missing.png").unlink()
    picture(99, (600, 300)).save(files / "changed.png")
    for case in ("link", "pipe", "folder"):
        (files / f"{case}.png").unlink()
    (files / "link.png").symlink_to(files / "kept.png")
    os.mkfifo(files / "pipe.png")
    (files / "folder.png").mkdir()
    (files / "damaged.png").write_bytes((files / "damaged.png").read_bytes()[:200])
    return images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return write_samples(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def board(images: dict[str, dict[str, Any]]) -> Iterator[ServedBoard]:
    with served_board(Path(images["kept"]["path"]).parents[1] / "output") as served:
        yield served


def address(board: ServedBoard, case: str, digest: str, step: int = 1) -> str:
    return f"/api/runs/{board.run('one')['id']}/samples/{step}/{2 * CASES.index(case)}/images/{digest}"


def test_prompts_with_equal_text_and_other_images_are_others(board: ServedBoard) -> None:
    run = board.run("one")["id"]
    prompts = board.get(f"/api/runs/{run}/prompts")["rows"]
    assert [row["samples"] for row in prompts] == [*[2] * (len(CASES) + 1), 1], "one has none, one another size"
    key = board.get(f"/api/runs/{run}/samples/1/0")["prompt_key"]
    assert {row["index"] for row in board.get(f"/api/prompts/{key}")["rows"]} == {0, 1}


def test_a_thumbnail_is_a_small_jpeg_of_the_picture(board: ServedBoard, images: dict[str, dict[str, Any]]) -> None:
    sample = board.get(f"/api/runs/{board.run('one')['id']}/samples/1/0")
    assert sample["images"] == [{"name": "kept.png", "digest": images["kept"]["digest"]}]
    answer = board.ask(address(board, "kept", images["kept"]["digest"]))
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["x-content-type-options"] == "nosniff" and b"SECRET" not in answer.content
    shown = Image.open(io.BytesIO(answer.content))
    assert shown.size == (256, 128)
    path = f"/api/runs/{board.run('one')['id']}/samples/1/1"
    assert [image["name"] for image in board.get(path)["images"]] == ["kept.png", "shown.png"], "by an environment"
    assert board.ask(f"{path}/images/{images['shown']['digest']}").status_code == 200
    assert max(abs(a - b) for a, b in zip(mean(shown), mean(picture(0, (600, 300))), strict=True)) < 4


def mean(image: Image.Image) -> tuple[int, ...]:
    return image.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("missing", "cannot be read (No such file"),
        ("changed", "has changed"),
        ("other", "has changed"),
        ("link", "cannot be read (Too many levels of symbolic links)"),
        ("pipe", "cannot be read (it is no regular file)"),
        ("folder", "cannot be read (it is no regular file)"),
        ("damaged", "has changed"),
        ("nul", "cannot be read (embedded null byte)"),
        ("relative", "cannot be read"),
    ],
)
def test_other_files_are_refused(board: ServedBoard, images: dict[str, dict[str, Any]], case: str, reason: str) -> None:
    answer = board.ask(address(board, case, images[case]["digest"]))
    assert answer.status_code == 400 and reason in answer.json()["error"]


def test_only_what_the_sample_names_is_read(board: ServedBoard, images: dict[str, dict[str, Any]]) -> None:
    kept, other = images["kept"]["digest"], images["changed"]["digest"]
    answer = board.ask(address(board, "kept", other))
    assert answer.status_code == 400 and "one that the sample names" in answer.json()["error"]
    for digest in ("..%2F..%2Fetc", kept.upper(), kept[:-1]):
        assert board.ask(address(board, "kept", digest)).status_code in (400, 404)
    assert board.ask(address(board, "kept", kept, step=9)).status_code == 404
    run = board.run("one")["id"]
    assert [board.get(f"/api/runs/{run}/samples/2/{index}")["images"] for index in (0, 1)] == [[], []]
    answer = board.ask(f"/api/runs/{run}/samples/2/2/images/{huge(images['kept'])['digest']}")
    assert Image.open(io.BytesIO(answer.content)).size == (256, 128), "not scaled up to its recorded size"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    given = recorded(tmp_path / "a.png", picture(1))
    os.truncate(tmp_path / "a.png", 2**40)
    assert "at most 67,108,864 bytes" in refused(ImageReference(**given).image)


def test_one_answer_to_many_pictures_is_found(tmp_path: Path) -> None:
    """One question about ten pictures is ten prompts."""
    write_samples(tmp_path)
    workspace = workspace_of(tmp_path / "output")
    (run,) = workspace.folders.all()
    rows = sample_rows(9, 20)
    first = json.loads((run.folder / "samples.jsonl").read_text().splitlines()[0])
    for number, row in enumerate(rows):
        image = first["images"][0] | {"digest": f"{number:032x}"}
        row |= {"prompt": first["prompt"], "images": [image], "completion": "always the same"}
    append_rows(run.folder, rows)
    assert "same answer to all prompts" in [found.name for found in workspace.signals(run)]


# -- judgements


def test_a_pair_shows_its_images_and_trains_on_them(tmp_path: Path) -> None:
    images = write_samples(tmp_path)
    workspace = workspace_of(tmp_path / "output")
    (run,) = map(workspace.samples, workspace.folders.all())
    preferences = workspace.preferences
    while (pair := preferences.next([run]))["images"] != [{"name": "kept.png", "digest": images["kept"]["digest"]}]:
        assert pair["pair"]
    digest = images["kept"]["digest"]
    assert Image.open(io.BytesIO(preferences.thumbnail(pair["pair"], digest))).size == (256, 128)
    assert "one that the sample names" in refused(preferences.thumbnail, "other", digest)
    preferences.judge(pair["pair"], "left", "ada")
    preferences.write_pairs(tmp_path / "pairs.jsonl")
    (row,) = read_rows(tmp_path / "pairs.jsonl")
    read = read_reference(row["images"][0], "image", folder=None, max_pixels=2**20)
    assert read.image().tobytes() == picture(0, (600, 300)).tobytes()
    assert row["prompt"][0]["content"].count("<image>") == 1
    judged = json.loads((tmp_path / "output" / "preferences.jsonl").read_text())
    assert judged["images"] == [images["kept"]]
    Path(images["kept"]["path"]).unlink()
    assert "put it back" in refused(preferences.write_pairs, tmp_path / "again.jsonl")
