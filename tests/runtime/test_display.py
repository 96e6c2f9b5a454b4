"""What a training loop shows: log lines, the progress bar of a terminal, numbers and durations."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text

from hybrid_rlhf.runtime.observability.display import StepDisplay
from hybrid_rlhf.runtime.observability.formatting import format_clock, format_duration, format_value
from hybrid_rlhf.runtime.observability.logs import logger, setup_logging
from hybrid_rlhf.runtime.world import solo_world
from tests.support.clock import ManualClock


def test_each_step_is_a_line_with_the_remaining_time(log_lines: list[str]) -> None:
    clock = ManualClock()
    with StepDisplay("sft", total_steps=5, every=2, clock=clock) as display:
        for step in range(1, 6):
            clock.seconds += 100
            display.show(step, {"sft/loss": 1.25, "lr": 1e-5})
    left = {2: "0:05:00", 4: "0:01:40", 5: "0:00:00"}
    assert log_lines == [f"sft {s}/5  ETA {left[s]}  sft/loss 1.25  lr 1.00e-05" for s in left]


def test_the_estimate_follows_the_last_steps_of_this_process(log_lines: list[str]) -> None:
    clock = ManualClock()
    with StepDisplay("ppo", total_steps=1000, done_steps=900, clock=clock) as display:
        for step in range(901, 931):
            clock.seconds += 1000 if step < 905 else 3
            display.show(step, {})
    assert log_lines[0] == "ppo 901/1000  ETA 27:30:00  ", "900 steps of an earlier process took no time in this one"
    assert log_lines[-1] == "ppo 930/1000  ETA 0:03:30  ", "the slow first steps no longer count"


def test_a_terminal_of_80_columns_shows_every_figure() -> None:
    """On 80 columns the step, total, times, speed and metric once gave way to the metrics."""
    clock, shown = ManualClock(), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    metrics = {"preference/accuracy": 0.67134, "lr": 1e-5, "perf/tokens_per_second": 148670.3, "eval/loss": 2.0}
    with StepDisplay("preference", total_steps=20000, console=console, clock=clock) as display:
        for step in (12344, 12345):
            clock.seconds += 1.7
            display.show(step, metrics)
    bar = Text.from_ansi(shown.getvalue().replace("\r", "\n")).plain.rstrip().splitlines()[-1]
    assert re.fullmatch(
        r"preference +[━╸╺ ]+ 12345/20000 0:00:0\d ETA 3:36:54 148,670 tokens/s  accuracy 0.6713", bar.rstrip()
    ), bar
    assert len(bar) <= 80


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_of_the_log_begin_with_the_time_but_not_on_a_terminal(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch systems and log files have no other clock."""
    console = io.StringIO()
    monkeypatch.setattr(console, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stdout", console)
    setup_logging(solo_world(torch.device("cpu")), file=tmp_path / "log.txt")
    logger.info("a line")
    logger.handlers.clear()
    texts = [(tmp_path / "log.txt").read_text()] + [console.getvalue()] * (not is_terminal)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d a line\n", text) for text in texts)
    assert not is_terminal or console.getvalue() == "a line\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(48670.2, "48,670"), (999.96, "1,000"), (1234.5, "1,234"), (12.3456, "12.35"), (1e-5, "1.00e-05"), (0, "0")],
)
def test_numbers_read_as_people_write_them(value: float, text: str) -> None:
    assert format_value(value) == text


def test_durations() -> None:
    assert [format_duration(s) for s in (4.23, 200, 7500)] == ["4.23 s", "3 min 20 s", "2 h 5 min"]
    assert [format_clock(s) for s in (0.2, 200, 93600, -3)] == ["0:00:00", "0:03:20", "26:00:00", "0:00:00"]
