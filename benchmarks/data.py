"""Rows per minute of `hybrid-rlhf data convert` and `data check`, as a user starts them, imports included; and the CPU
time and peak memory with which a step loads its rows, first without and then with a cache.

CPU time is counted: all use one core, and it hardly depends on what else the machine does.

python -m benchmarks.data                         # 100,000 conversations, the tokenizer of a tiny model
python -m benchmarks.data --tokenizer MODEL       # another tokenizer
python -m benchmarks.data --start --rows 200000 --tokenizer embedded     # only the loading of rows
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


def write_messages(file: Path, rows: int) -> None:
    """Conversations of one question and one answer, about 340 bytes each, seeded."""
    chosen = random.Random(0)
    with file.open("w") as opened:
        for _ in range(rows):
            texts = [" ".join(chosen.choices(WORDS, k=chosen.randint(10, 40))) for _ in range(2)]
            turns = [{"role": r, "content": text} for r, text in zip(("user", "assistant"), texts, strict=True)]
            opened.write(json.dumps({"messages": turns}) + "\n")


def measured(words: list[str], rows: int) -> None:
    """Run a command and print its time."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hybrid_rlhf.cli.main", "data", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shown = " ".join(Path(word).name if "/" in word else word for word in words)
    print(f"{shown:50} {seconds:6.1f} s, {cpu:6.1f} s of CPU: {60 * rows / cpu:9,.0f} rows per CPU minute", flush=True)


def load_rows(file: Path, tokenizer: str, cache: str) -> None:
    """Load the rows as `hybrid-rlhf sft` does, up to the first batch, and print the cost."""
    import torch

    from hybrid_rlhf.configs.sections.training import MicroBatches
    from hybrid_rlhf.configs.sft import SFTDataConfig
    from hybrid_rlhf.data.loaders import BatchLoader
    from hybrid_rlhf.data.tokenized import load_sft_data
    from hybrid_rlhf.models.pretrained.sources import resolve_model
    from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
    from hybrid_rlhf.runtime.world import solo_world

    world = solo_world(torch.device("cpu"))
    loaded = load_tokenizer(resolve_model(tokenizer, world=world))
    imports = time.process_time()
    data = load_sft_data(SFTDataConfig(sources=[str(file)], cache_dir=cache), tokenizer=loaded, seed=0, world=world)
    loader = BatchLoader(
        data.train, global_batch_size=32, world_rank=0, world_size=1, micro_batches=MicroBatches(8), seed=0
    )
    next(loader.iterate())
    seconds = time.process_time() - imports
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = f"{len(data.train):,} rows"
    print(f"{rows}: {seconds:.1f} s of CPU after {imports:.1f} s of imports, peak {gib:.2f} GiB", flush=True)


def main() -> None:
    """Print one line per command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokenizer", help="a model; default: the tiny model of the tests")
    parser.add_argument("--start", action="store_true", help="measure the loading of rows only")
    parser.add_argument("--load", nargs=2, metavar=("FILE", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load is not None:
        load_rows(Path(given.load[0]), given.tokenizer, given.load[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        source, rows = Path(folder) / "sharegpt.jsonl", Path(folder) / "rows.jsonl"
        write_conversations(source, given.rows)
        tokenizer = given.tokenizer
        if tokenizer is None:
            from tests.support.tiny import tiny_model, tiny_tokenizer

            tokenizer = str(Path(folder) / "tiny")
            tiny_model().save_pretrained(tokenizer)
            tiny_tokenizer().save_pretrained(tokenizer)
        if given.start:
            write_messages(source, given.rows)
            words = ["--tokenizer", tokenizer, "--load", str(source), str(Path(folder) / "cache")]
            for _ in range(2):
                subprocess.run([sys.executable, "-m", "benchmarks.data", *words], check=True, stderr=subprocess.DEVNULL)
            return
        measured(["convert", str(source), "--output", str(rows)], given.rows)
        measured(["check", str(rows)], given.rows)
        measured(["check", str(rows), "--tokenizer", tokenizer], given.rows)


if __name__ == "__main__":
    main()
