"""How fast a board answers over a large run: `python -m benchmarks.board [STEPS] [SAMPLES]`, 10,000 and 1,000.

Samples are written for two minutes at most, and the number written is printed. The index is made first; then each
request is made five times, the median printed, and the board's resident memory after all of them. Memory counts the
mapped columns of the index, which the kernel drops when it needs the space.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

from tests.support.board import ServedBoard, append_metrics, served_board, write_run

WRITE_SECONDS = 120.0
WORDS = [f"word{number}" for number in range(5000)]
QUERIES: dict[str, dict[str, Any]] = {
    "first page": {},
    "a step": {"step": 5},
    "score range by score": {"score_min": 0.5, "score_max": 1.5, "sort": "score", "order": "desc"},
    "all by KL": {"sort": "kl", "order": "desc"},
    "component and length": {"component": "format", "component_min": 0.9, "length_max": 100},
    "a rare word": {"text": "needle"},
    "a common word": {"text": "word1"},
    "beginnings of words": {"text": "word12*"},
    "last page by score": {"sort": "score", "offset": -50},
}


def write_samples(folder: Path, steps: int, samples: int) -> int:
    """Write steps until all are written or the time is up; the number of steps."""
    random = np.random.default_rng(0)
    file = (folder / "samples.jsonl").open("wb")
    start = time.monotonic()
    for step in range(1, steps + 1):
        scores, kl = random.normal(size=samples), random.gamma(2.0, size=samples)
        lengths, words = random.integers(20, 200, samples), random.integers(0, len(WORDS), (samples, 40))
        prompts = (125 * step + np.arange(samples) // 8) % 9973
        lines = []
        for index in range(samples):
            text = " ".join(WORDS[word] for word in words[index]) + (" needle" if index == step % 997 else "")
            lines.append(
                f'{{"step": {step}, "prompt": [{{"role": "user", "content": "Question {prompts[index]}"}}], '
                f'"completion": "{text}", "score": {scores[index]:.6f}, "kl": {kl[index]:.6f}, '
                f'"weight_versions": [[{step}, {lengths[index]}]], "index": {index}, "group": {index // 8}, '
                f'"length": {lengths[index]}, "stopped": true, "components": {{"model": {scores[index]:.6f}, '
                f'"format": {index % 10 / 9:.3f}}}, "advantage": 0.1}}\n'
            )
        file.write("".join(lines).encode())
        if time.monotonic() - start > WRITE_SECONDS:
            break
    file.close()
    return step


def median_milliseconds(board: ServedBoard, path: str, **query: Any) -> float:
    """Of five requests."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        board.get(path, **query)
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


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


def main(steps: int, samples: int) -> None:
    """Write, index, ask, print."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_run(Path(temporary) / "output" / "large")
        for step in range(1, steps + 1):
            append_metrics(folder, step, **{f"other/{number}": step * 0.1 for number in range(50)})
        start = time.monotonic()
        written = write_samples(folder, steps, samples)
        size = (folder / "samples.jsonl").stat().st_size / 2**30
        took = time.monotonic() - start
        print(f"{written} of {steps} steps x {samples} samples, {size:.2f} GiB, written in {took:.0f} s")
        with served_board(folder.parent) as board:
            run = board.run("large")["id"]
            print(f"{'list of runs':24}{median_milliseconds(board, '/api/runs'):8.1f} ms")
            names = ["objective/kl", "objective/scores", "other/1"]
            took = median_milliseconds(board, "/api/metrics", run=run, name=names)
            print(f"{f'3 curves of {steps} steps':24}{took:8.1f} ms")
            start = time.monotonic()
            path = f"/api/runs/{run}/samples"
            board.get(path)
            print(f"{'first page, no index':24}{(time.monotonic() - start) * 1000:8.1f} ms")
            while (page := board.get(path))["indexed"] < 1:
                time.sleep(0.5)
            print(f"{'whole index':24}{time.monotonic() - start:8.1f} s")
            for name, query in QUERIES.items():
                query = {**query, "offset": page["total"] - 50} if query.get("offset") else query
                found = board.get(path, **query)
                print(f"{name:24}{median_milliseconds(board, path, **query):8.1f} ms  {found['total']} rows")
            print(f"{'prompts':24}{median_milliseconds(board, f'/api/runs/{run}/prompts'):8.1f} ms")
            memory = psutil.Process(board.process.pid).memory_info()
            print(f"{'resident':24}{memory.rss / 2**20:8.0f} MiB, of them {memory.shared / 2**20:.0f} mapped files")
            print(f"{'a new metric':24}{seconds_until_metric(board, folder, steps + 1):8.2f} s")
            index = sum(file.stat().st_size for file in (folder / "samples.index").rglob("*") if file.is_file())
            print(f"{'size of the index':24}{index / 2**30:8.2f} GiB")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    main(*(numbers or [10_000, 1_000]))
