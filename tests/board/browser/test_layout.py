"""Every view on a phone, in both themes, and for assistive technology; the first paint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.board import ServedBoard
from tests.support.browser import DESKTOP, PHONE, axe_findings, show, wait_in_page

pytestmark = pytest.mark.slow

VIEWS = {
    "runs": "runs",
    "curves": "curves?run={run}&run={other}",
    "run": "run?run={run}",
    "rollouts": "rollouts?run={run}&score_min=0&component=correct",
    "groups": "rollouts?run={run}&view=groups",
    "sample": "sample?run={run}&step=60&index=23",
    "tokens": "sample?run={run}&step=60&index=3&view=tokens&place=60",
    "signals": "signals?run={run}",
    "preferences": "preferences?run={run}",
    "asked": "preferences?ask=1",
    "chat": "chat",
    "start": "start",
}
_CUT_OFF = """() => [...document.querySelectorAll('main *, .top *')].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || !element.checkVisibility() || box.right <= innerWidth + 1) return false;
  for (let outer = element; outer; outer = outer.parentElement) {
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(outer).overflowX)) return false;
  }
  return true;
}).map(element => `${element.tagName}.${element.className}`).slice(0, 5)"""


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_is_cut_off_and_axe_finds_nothing(board: ServedBoard, page: Any, name: str) -> None:
    address = VIEWS[name].format(run=board.run("gsm-ppo")["id"], other=board.run("gsm-grpo-seed1")["id"])
    page.set_viewport_size(PHONE)
    show(page, board.url, address)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate(_CUT_OFF) == []
    page.set_viewport_size(DESKTOP)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        show(page, board.url, address)
        assert page.evaluate(_CUT_OFF) == [] and axe_findings(page) == [], scheme


def test_the_dialog_of_keys_is_accessible(board: ServedBoard, page: Any) -> None:
    page.set_viewport_size(PHONE)
    show(page, board.url, "runs")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    assert axe_findings(page) == []


@pytest.mark.faults  # a time, which other work on the machine changes
def test_the_first_paint_takes_less_than_a_second(board: ServedBoard, page: Any) -> None:
    """The fastest of three, because other tests run beside it."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    times = []
    for _ in range(3):
        show(page, board.url, "runs")
        wait_in_page(page, paint)
        times.append(page.evaluate(paint))
    assert min(times) < 1000, times
