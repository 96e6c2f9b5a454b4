"""Rows per minute of `hybrid-rlhf data convert` and `data check`, as a user starts them, imports included.

CPU time is counted: both use one core, and it hardly depends on what else the machine does.

python -m benchmarks.data                         # 100,000 conversations, the tokenizer of a tiny model
python -m benchmarks.data --tokenizer MODEL       # another tokenizer
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = "the a model learns from data that people write and rate which answer is better or worse than another".split()


def write_conversations(file: Path, rows: int) -> None:
    """ShareGPT conversations of two or four turns with 10 to 60 words each, seeded."""
    chosen = random.Random(0)
    with file.open("w") as opened:
        for _ in range(rows):
            turns = [
                {"from": speaker, "value": " ".join(chosen.choices(WORDS, k=chosen.randint(10, 60)))}
                for speaker in ("human", "gpt") * chosen.randint(1, 2)
            ]
            opened.write(json.dumps({"conversations": turns}) + "\n")


def measured(words: list[str], rows: int) -> None:
    """Run a command and print its time."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hybrid_rlhf.cli.main", "data", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shown = " ".join(Path(word).name if "/" in word else word for word in words)
    print(f"{shown:50} {seconds:6.1f} s, {cpu:6.1f} s of CPU: {60 * rows / cpu:9,.0f} rows per CPU minute", flush=True)


def main() -> None:
    """Print one line per command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokenizer", help="a model; default: the tiny model of the tests")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, rows = Path(folder) / "sharegpt.jsonl", Path(folder) / "rows.jsonl"
        write_conversations(source, given.rows)
        tokenizer = given.tokenizer
        if tokenizer is None:
            from tests.support.tiny import tiny_model, tiny_tokenizer

            tokenizer = str(Path(folder) / "tiny")
            tiny_model().save_pretrained(tokenizer)
            tiny_tokenizer().save_pretrained(tokenizer)
        measured(["convert", str(source), "--output", str(rows)], given.rows)
        measured(["check", str(rows)], given.rows)
        measured(["check", str(rows), "--tokenizer", tokenizer], given.rows)


if __name__ == "__main__":
    main()
