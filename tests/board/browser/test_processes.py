"""What the page starts, to its end: a run from the form, its stop and resume, a reward model, a branch and a score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.board import ServedBoard, served_board, write_run
from tests.support.browser import require_browser, show, wait_in_page
from tests.support.steps import write_rows

pytestmark = pytest.mark.faults
PATIENCE_MS = 600_000


@pytest.fixture
def judged_board(tmp_path: Path) -> Iterator[ServedBoard]:
    """A board over a run with samples, which may start others."""
    require_browser()
    write_run(tmp_path / "output" / "judged", steps=2, samples=16)
    with served_board(tmp_path / "output") as board:
        yield board


def test_a_run_is_started_from_the_form_stopped_and_resumed(
    judged_board: ServedBoard, page: Any, model_folder: Path, tmp_path: Path
) -> None:
    values = {"model.path": model_folder, "data.sources": write_rows(tmp_path / "rows.jsonl"), "output_dir": "mine"}
    values |= {"data.cache_dir": tmp_path / "cache", "data.max_length": 64, "train.global_batch_size": 4}
    values |= {"train.max_steps": 100_000, "train.epochs": 100_000}
    show(page, judged_board.url, "start?command=sft")
    page.get_by_label("All settings").check()
    for key, value in values.items():
        page.locator(f"[id='field-{key}']").fill(str(value))
    page.get_by_text(f"{len(values)} settings changed").wait_for()
    page.get_by_role("row", name="SFT training").wait_for(timeout=PATIENCE_MS)
    page.get_by_role("button", name="Start the run").click()
    page.get_by_role("heading", name="mine", exact=True).wait_for()
    try:
        page.locator(".facts .state-running").wait_for()
        judged_board.wait("mine", lambda run: run["step"] >= 2)
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Stop the run").click()
        page.locator(".facts .state-stopped").wait_for(timeout=PATIENCE_MS)
        stopped = judged_board.run("mine")
        assert len(page.locator(".printed").inner_text().splitlines()) > 2
        page.get_by_role("button", name="Resume").click()
        page.locator(".facts .state-running").wait_for(timeout=PATIENCE_MS)
        judged_board.wait("mine", lambda run: run["step"] > stopped["step"])
        wait_in_page(
            page,
            f"parseInt(document.querySelector('.fact:nth-child(2) dd').textContent) > {stopped['step']}",
            seconds=60,
        )
    finally:
        judged_board.post(f"/api/runs/{judged_board.run('mine')['id']}/stop", {})
        judged_board.wait("mine", lambda run: run["state"] != "running")


def test_judgements_become_a_reward_model(judged_board: ServedBoard, page: Any, model_folder: Path) -> None:
    show(page, judged_board.url, f"preferences?run={judged_board.run('judged')['id']}")
    for count in range(1, 6):
        wait_in_page(page, "document.querySelector('.answer button')?.disabled === false")
        page.keyboard.press("2")
        page.get_by_text(f"{count} judgement{'s' * (count > 1)}", exact=False).first.wait_for()
    page.get_by_role("button", name="Train a reward model").click()
    dialog = page.get_by_role("dialog", name="Train a reward model")
    assert dialog.get_by_label("Start from").input_value() == "some/model"  # that of the judged run
    dialog.get_by_label("Start from").fill(str(model_folder))
    dialog.get_by_role("button", name="Start", exact=True).click()
    dialog.get_by_role("link", name="Watch the run").click()
    page.get_by_role("heading", name="reward_from_preferences", exact=True).wait_for()
    page.locator(".facts .state-finished").wait_for(timeout=PATIENCE_MS)
    run = judged_board.run("reward_from_preferences")
    assert run["command"] == "reward" and run["step"] == 2  # four pairs, two at a time, and one held out
    assert "model.safetensors" in judged_board.get(f"/api/runs/{run['id']}")["files"]


def test_a_sample_is_scored_again_and_branched(trained_folder: Path, page: Any) -> None:
    require_browser()
    with served_board(trained_folder) as board:
        run = board.run("rl")["id"]
        sample = board.get(f"/api/runs/{run}/samples/1/1")
        place = sample["tokens"]["prompt_length"]
        show(page, board.url, f"sample?run={run}&step=1&index=1&view=tokens&place={place}")
        page.get_by_role("heading", name="Edit and score again").click()
        page.get_by_role("textbox", name="Completion").fill("four words are here")
        page.get_by_role("button", name="Score", exact=True).click()
        cells = page.locator(".sample-side details tr", has=page.get_by_role("rowheader", name="length")).locator("td")
        cells.first.wait_for(timeout=PATIENCE_MS)
        assert cells.all_inner_texts()[:2] == [f"{sample['components']['length']:.0f}", "4"]
        page.get_by_label("Samples").fill("2")
        page.get_by_role("button", name="Branch here").click()
        page.locator(".branches li").first.wait_for(timeout=PATIENCE_MS)
        assert page.locator(".branches li").count() == 2
        assert "score" in page.locator(".branches li").first.inner_text()
