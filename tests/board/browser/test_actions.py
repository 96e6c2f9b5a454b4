"""What the page does to runs and models: chat, stop, and jobs that say why they fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.board import ServedBoard, append_metrics, hold_lock, served_board, write_run
from tests.support.browser import axe_findings, press, require_browser, show, wait_for_text, wait_in_page
from tests.support.tiny import save_tiny, tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def own_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBoard]:
    """A board over a run without checkpoints and two tiny models."""
    require_browser()
    folder = tmp_path_factory.mktemp("board") / "output"
    write_run(folder / "training", steps=3, samples=8)
    odd = write_run(folder / "odd")
    for step in (1, 2, 3):
        append_metrics(odd, step, **{"constructor": 2.0 * step, "__proto__": 1.5 * step})
    for seed, name in enumerate(("first", "second")):
        save_tiny(folder / name, tiny_model(seed=seed))
    with served_board(folder) as board:
        yield board


def test_two_models_answer_side_by_side(own_board: ServedBoard, page: Any) -> None:
    models = {model["name"]: model["path"] for model in own_board.get("/api/models")}
    show(page, own_board.url, f"chat?model={models['first']}&model={models['second']}")
    page.get_by_text("Sampling, system prompt, scores").click()
    page.get_by_label("Longest answer").fill("12")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    wait_for_text(page, "Loading first…")  # torch is imported and the model loaded
    answers = page.locator(".message-assistant .message-text")
    assert answers.count() == 2 and page.locator(".message-user").count() == 2
    page.get_by_role("button", name="Send").wait_for()
    left, right = answers.all_text_contents()
    assert left and right and left != right and page.locator(".chat-column .error-line").count() == 0
    page.get_by_label("Message", exact=True).fill("again")
    press(page, "Send")
    page.get_by_role("button", name="Send").wait_for()
    assert answers.count() == 4 and answers.all_text_contents()[0] == left
    assert axe_findings(page) == []


def test_metrics_named_like_members_of_objects_have_curves(own_board: ServedBoard, page: Any) -> None:
    """The view stayed at "Loading metrics…"."""
    show(page, own_board.url, f"curves?run={own_board.run('odd')['id']}")
    for name, last in (("constructor", "6"), ("__proto__", "4.5")):
        chart = page.locator("figure.chart", has=page.get_by_role("heading", name=name, exact=True))
        chart.locator(".u-over").wait_for()
        assert chart.locator(".chart-values").inner_text().strip() == last
    append_metrics(Path(own_board.run("odd")["folder"]), 4, **{"__proto__": 9.0})
    wait_in_page(page, "[...document.querySelectorAll('.chart-values')].some(v => v.textContent.trim() === '9')")


def test_a_run_is_stopped_after_a_question(own_board: ServedBoard, page: Any) -> None:
    run = own_board.run("training")
    with hold_lock(Path(run["folder"])) as process:
        show(page, own_board.url, f"run?run={run['id']}")
        page.locator(".facts .state-running").wait_for()
        press(page, "Stop")
        dialog = page.get_by_role("dialog", name="Stop training?")
        press(dialog, "Keep training")
        assert process.poll() is None
        press(page, "Stop")
        press(dialog, "Stop the run")
        page.locator(".facts .state-stopped").wait_for()
        page.get_by_role("button", name="Resume").wait_for()
        assert process.wait(timeout=60) != 0


def test_a_board_that_ended_is_named(page: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "output" / "one", steps=2)
    with served_board(tmp_path / "output") as board:
        show(page, board.url, "runs")
        page.get_by_text("Live", exact=True).wait_for()
    page.get_by_text("Connecting", exact=True).wait_for()
    page.evaluate("location.hash = '#/chat'")
    wait_for_text(page, "The board does not answer.")
    wait_in_page(page, "document.querySelector('h1').textContent === 'Chat'")
