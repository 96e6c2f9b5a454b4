"""How fast a board answers over a large run: `python -m benchmarks.board`, 300 steps with 1,000 samples each.

Completions have 40 words out of 5,000. A board indexes them from samples.jsonl as those of any run. Then each request
is made five times over HTTP: printed are the median, the slowest, and the processor time of the board per request.
Where there is a browser (tests/support/browser.py), views are opened in it too. In a `--folder` samples and index are
kept and used again.
"""

from __future__ import annotations

import argparse
import os
import platform
import sqlite3
import statistics
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

from tests.support.board import ServedBoard, append_metrics, served_board, write_run
from tests.support.browser import CHROMIUM, browser_context, checked_page
from tests.support.runs import ENVIRONMENT

WORDS = [f"word{number}" for number in range(5000)]
TEXTS = 20_000
STEP_WIDTH = 6
REQUESTS = 5
QUERIES: dict[str, dict[str, Any]] = {
    "first page": {},
    "a step": {"step": 5},
    "score range by score": {"score_min": 0.5, "score_max": 1.5, "sort": "score", "order": "desc"},
    "all by KL": {"sort": "kl", "order": "desc"},
    "all by length": {"sort": "length"},
    "component and length": {"component": "format", "component_min": 0.9, "length_max": 100},
    "a rare word": {"text": "needle"},
    "a common word": {"text": "word1"},
    "two common words": {"text": "word1 word2"},
    "beginnings of words": {"text": "word12*"},
    "a word of prompts": {"text": "question 12*"},
    "word, score, by KL": {"text": "word12*", "score_min": 0.5, "sort": "kl"},
    "last page by score": {"sort": "score", "offset": -50},
}


def write_samples(folder: Path, steps: int, samples: int) -> None:
    """Write all samples."""
    random = np.random.default_rng(0)
    texts = [" ".join(WORDS[word] for word in words) for words in random.integers(0, len(WORDS), (TEXTS, 40))]
    with (folder / "samples.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            scores, kl = random.normal(size=samples).tolist(), random.gamma(2.0, size=samples).tolist()
            lengths, chosen = random.integers(20, 200, samples).tolist(), random.integers(0, TEXTS, samples).tolist()
            lines = []
            for index in range(samples):
                needle = " needle" if index == step % 997 else ""
                lines.append(
                    f'{{"step": {step:{STEP_WIDTH}}, "prompt": [{{"role": "user", "content": "Question '
                    f'{(125 * step + index // 8) % 9973}"}}], "completion": "{texts[chosen[index]]}{needle}", '
                    f'"score": {scores[index]:.6f}, "kl": {kl[index]:.6f}, '
                    f'"weight_versions": [[{step}, {lengths[index]}]], "index": {index}, "group": {index // 8}, '
                    f'"length": {lengths[index]}, "stopped": true, "components": {{"model": {scores[index]:.6f}, '
                    f'"format": {index % 10 / 9:.3f}}}, "advantage": 0.1}}\n'
                )
            file.write("".join(lines).encode())


def report(title: str, board: ServedBoard, path: str, **query: Any) -> None:
    """Print the median and the slowest time of some requests, the processor time of the board, and the rows found."""
    times, before = [], processor_seconds(board)
    for _ in range(REQUESTS):
        start = time.perf_counter()
        found = board.get(path, **query)
        times.append((time.perf_counter() - start) * 1000)
    busy = 1000 * (processor_seconds(board) - before) / REQUESTS
    rows = f"  {found['total']:,} rows" if "total" in found else ""
    print(f"{title:24}{statistics.median(times):8.1f} ms{max(times):8.1f} ms{busy:6.0f} ms{rows}", flush=True)


def processor_seconds(board: ServedBoard) -> float:
    """What the board has used so far, which other work on the machine changes less than the time that passed."""
    times = psutil.Process(board.process.pid).cpu_times()
    return times.user + times.system


def memory_of(board: ServedBoard) -> str:
    """Resident memory now and at its peak."""
    status = Path(f"/proc/{board.process.pid}/status").read_text()
    now, peak = (int(status.split(f"{name}:")[1].split()[0]) / 2**10 for name in ("VmRSS", "VmHWM"))
    return f"{now:.0f} MiB; {peak:.0f} MiB at the peak"


def seconds_until_metric(board: ServedBoard, folder: Path) -> float:
    """From the append of a line to its event."""
    step = board.run(folder.name)["step"] + 1
    ready, seen = threading.Event(), threading.Event()

    def listen() -> None:
        with httpx2.stream("GET", f"{board.url}/api/events", timeout=60) as stream:
            for line in stream.iter_lines():
                ready.set()
                if f'"step": {step},' in line:
                    seen.set()
                    return

    threading.Thread(target=listen, daemon=True).start()
    assert ready.wait(30)
    time.sleep(0.7)
    start = time.monotonic()
    append_metrics(folder, step)
    assert seen.wait(30)
    return time.monotonic() - start


def open_in_browser(board: ServedBoard, run: str) -> None:
    """Print when views of the run paint first and when they have their data, and how long a filter takes."""
    if CHROMIUM is None:
        print("no browser: views were not opened")
        return
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    views = {"runs": ".runs-table a", f"rollouts?run={run}": ".sample-row", f"curves?run={run}": ".u-over"}
    with browser_context() as context, checked_page(context) as page:
        for address, element in views.items():
            times = []
            for _ in range(REQUESTS):
                page.goto("about:blank")
                start = time.perf_counter()
                page.goto(f"{board.url}/#/{address}")
                page.wait_for_selector(element)
                times.append((page.evaluate(paint), 1000 * (time.perf_counter() - start)))
            first, whole = (statistics.median(each) for each in zip(*times, strict=True))
            name = f"view of {address.split('?')[0]}"
            print(f"{name:24}{first:8.1f} ms until the first paint, {whole:.0f} ms with data")
        page.goto(f"{board.url}/#/rollouts?run={run}")
        page.wait_for_selector(".sample-row")
        start = time.perf_counter()
        page.get_by_label("Search prompts and completions").fill("needle")
        total = board.get(f"/api/runs/{run}/samples", text="needle", limit=1)["total"]
        page.get_by_text(f"{total:,} samples", exact=True).wait_for()
        print(f"{'a search is typed':24}{1000 * (time.perf_counter() - start):8.1f} ms until its rows are shown")


def index_samples(output: Path) -> None:
    """Wait until a board has indexed all samples."""
    with served_board(output) as board:
        path = f"/api/runs/{board.run('large')['id']}/samples"
        start, before = time.monotonic(), processor_seconds(board)
        board.get(path)
        print(f"{'first page, no index':24}{(time.monotonic() - start) * 1000:8.1f} ms")
        while (page := board.get(path, limit=1))["indexed"] < 1:
            time.sleep(2)
        took, busy = time.monotonic() - start, processor_seconds(board) - before
        print(f"{'its index':24}{took:8.1f} s, {busy:.0f} s of processor time, for {page['total']:,} samples")
        print(f"{'resident':24}{memory_of(board)}", flush=True)


def write(output: Path, steps: int, samples: int) -> Path:
    """The run with its index, or that of an earlier call."""
    folder = output / "large"
    if not folder.exists():
        write_run(folder)
        for step in range(1, steps + 1):
            append_metrics(folder, step, **{f"other/{number}": step * 0.1 for number in range(50)})
        start = time.monotonic()
        write_samples(folder, steps, samples)
        print(f"{steps} steps x {samples} samples, written in {time.monotonic() - start:.0f} s", flush=True)
        index_samples(output)
    return folder


def main(steps: int, samples: int, output: Path) -> None:
    """Write, index, ask, print."""
    ENVIRONMENT["HOME"] = str(output)  # the index lies in its cache folder
    load = os.getloadavg()[1]
    print(
        f"python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores, {date.today()}"
    )
    folder = write(output, steps, samples)
    with served_board(output) as board:
        run = board.run("large")["id"]
        path = f"/api/runs/{run}/samples"
        start = time.monotonic()
        page = board.get(path)
        assert page["indexed"] == 1 and page["total"] == steps * samples, page["total"]
        print(f"{'first page at first':24}{(time.monotonic() - start) * 1000:8.1f} ms")
        report("list of runs", board, "/api/runs")
        names = ["objective/kl", "objective/scores", "other/1"]
        report(f"3 curves of {steps} steps", board, "/api/metrics", run=run, name=names)
        for name, query in QUERIES.items():
            query = {**query, "offset": page["total"] - 50} if query.get("offset") else query
            report(name, board, path, **query)
        report("one sample", board, f"{path}/{steps // 2}/{samples // 2}")
        report("prompts", board, f"/api/runs/{run}/prompts")
        report("a pair to judge", board, "/api/preferences/next", run=run)
        print(f"{'resident':24}{memory_of(board)}")
        open_in_browser(board, run)
        print(f"{'a new metric':24}{seconds_until_metric(board, folder):8.2f} s until its event")
    for name, parts in (
        ("samples.jsonl", [folder / "samples.jsonl"]),
        ("index", (output / ".cache").rglob("*.sqlite")),
    ):
        size = sum(file.stat().st_size for file in parts if file.is_file())
        print(f"{f'size of {name}':24}{size / 2**30:8.2f} GiB")
    print(f"{'load of the machine':24}{load:.1f} before, {os.getloadavg()[1]:.1f} after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=1_000)
    parser.add_argument("--folder", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(words.steps, words.samples, (words.folder or Path(temporary)) / "output")
