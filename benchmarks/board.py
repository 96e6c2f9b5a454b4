"""How fast a board answers over a large run: `python -m benchmarks.board [STEPS] [SAMPLES]`, 10,000 and 1,000.

Samples are drawn from 20,000 completions of 40 words out of 5,000, and are indexed by a board from samples.jsonl as
those of any run. Then each request is made five times over HTTP; its median and its slowest time are printed. Memory is
resident memory of the board, with the mapped columns of the index, which the kernel drops when it needs the space; its
peak is that since the start, indexing included. Where there is a browser (tests/support/browser.py), views are opened
in it too. Ten million samples need 9 GiB of disk and some minutes.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tests.support.board import ServedBoard, append_metrics, served_board, write_run
from tests.support.browser import CHROMIUM, browser_context, checked_page

WORDS = [f"word{number}" for number in range(5000)]
TEXTS = 20_000
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
                    f'{{"step": {step}, "prompt": [{{"role": "user", "content": "Question '
                    f'{(125 * step + index // 8) % 9973}"}}], "completion": "{texts[chosen[index]]}{needle}", '
                    f'"score": {scores[index]:.6f}, "kl": {kl[index]:.6f}, '
                    f'"weight_versions": [[{step}, {lengths[index]}]], "index": {index}, "group": {index // 8}, '
                    f'"length": {lengths[index]}, "stopped": true, "components": {{"model": {scores[index]:.6f}, '
                    f'"format": {index % 10 / 9:.3f}}}, "advantage": 0.1}}\n'
                )
            file.write("".join(lines).encode())


def report(name: str, board: ServedBoard, path: str, **query: Any) -> None:
    """Print the median and the slowest time of some requests, and the number of rows."""
    times = []
    for _ in range(REQUESTS):
        start = time.perf_counter()
        found = board.get(path, **query)
        times.append((time.perf_counter() - start) * 1000)
    rows = f"  {found['total']:,} rows" if "total" in found else ""
    limited = ", of the newest samples" if isinstance(found, dict) and found.get("total_is_limited") else ""
    print(f"{name:24}{statistics.median(times):8.1f} ms{max(times):8.1f} ms{rows}{limited}", flush=True)


def memory_of(board: ServedBoard) -> str:
    """Resident memory now and at its peak, and how much of it maps files."""
    status = Path(f"/proc/{board.process.pid}/status").read_text()
    now, peak, files = (int(status.split(f"{name}:")[1].split()[0]) / 2**10 for name in ("VmRSS", "VmHWM", "RssFile"))
    return f"{now:.0f} MiB, of them {files:.0f} of files; {peak:.0f} MiB at the peak"


def seconds_until_metric(board: ServedBoard, folder: Path, step: int) -> float:
    """From the append of a line to its event."""
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


def main(steps: int, samples: int) -> None:
    """Write, index, ask, print."""
    print(f"python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores, {date.today()}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_run(Path(temporary) / "output" / "large")
        for step in range(1, steps + 1):
            append_metrics(folder, step, **{f"other/{number}": step * 0.1 for number in range(50)})
        start = time.monotonic()
        write_samples(folder, steps, samples)
        size = (folder / "samples.jsonl").stat().st_size / 2**30
        took = time.monotonic() - start
        print(f"{steps} steps x {samples} samples, {size:.2f} GiB, written in {took:.0f} s", flush=True)
        with served_board(folder.parent) as board:
            run = board.run("large")["id"]
            path = f"/api/runs/{run}/samples"
            start = time.monotonic()
            board.get(path)
            print(f"{'first page, no index':24}{(time.monotonic() - start) * 1000:8.1f} ms")
            while (page := board.get(path, limit=1))["indexed"] < 1:
                time.sleep(2)
            print(f"{'whole index':24}{time.monotonic() - start:8.1f} s; {memory_of(board)}", flush=True)
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
            print(f"{'a new metric':24}{seconds_until_metric(board, folder, steps + 1):8.2f} s until its event")
            index = sum(file.stat().st_size for file in (folder / "samples.index").rglob("*") if file.is_file())
            print(f"{'size of the index':24}{index / 2**30:8.2f} GiB")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    main(*(numbers or [10_000, 1_000]))
