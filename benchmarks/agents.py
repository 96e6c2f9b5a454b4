"""Calls of tools by a pool in any order beside batches one after another, and programs of a verifier by its workers.

    python -m benchmarks.agents [--calls 256] [--threads 32] [--programs 256] [--record]

The calls sleep for log-normal times (median 0.3 s, sigma 1), of three seeds. A batch has as many calls as there are
threads, and the next one begins when all have ended. The programs are those of the verifier `code`, with one test each;
they compute next to nothing, so that their time is that of starting a process in the sandbox. `--record` writes the
printed lines to `benchmarks/results/agents.zip`.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import results
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.rl.environments.calls import EnvironmentCalls
from hybrid_rlhf.rl.rewards import CompletionTexts
from hybrid_rlhf.rl.rewards.verifiers.component import VerifierReward

CPU = torch.device("cpu")
MEDIAN_SECONDS = 0.3
SEEDS = 3


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def tool_lines(count: int, threads: int) -> list[str]:
    """A line for each seed: seconds by the pool and by batches, and their ratio."""
    calls = EnvironmentCalls(timeout_seconds=60.0, device=CPU, threads=threads)
    lines = []
    for seed in range(SEEDS):
        generator = random.Random(seed)
        sleeps = [MEDIAN_SECONDS * generator.lognormvariate(0.0, 1.0) for _ in range(count)]
        sleeping = [partial(time.sleep, seconds) for seconds in sleeps]
        pooled = seconds_of(lambda work=sleeping: calls(work))
        batched = seconds_of(lambda work=sleeping: in_batches(calls, work, threads))
        least = max(sum(sleeps) / threads, max(sleeps))
        lines.append(
            f"{count} calls, {threads} threads, seed {seed}: pool {pooled:.2f} s (at least {least:.2f}), batches "
            f"{batched:.2f} s, ratio {batched / pooled:.2f}"
        )
    return lines


def in_batches(calls: EnvironmentCalls, work: Sequence[Callable[[], object]], size: int) -> None:
    """Make the calls in batches, each of which waits for its longest call."""
    for start in range(0, len(work), size):
        calls(work[start : start + size])


def program_lines(count: int) -> list[str]:
    """A line for each number of workers: seconds of a rollout's programs."""
    completion = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    texts = CompletionTexts([[]] * count, [completion] * count, {"tests": [[{"input": "1 2", "output": "3"}]] * count})
    lines = []
    for workers in (1, os.cpu_count() or 1):
        part = VerifierReward(RewardComponentConfig(verifier="code", workers=workers), device=CPU)
        seconds = seconds_of(lambda judge=part: judge.score(texts))
        lines.append(f"{count} programs, {workers} workers: {seconds:.1f} s, {1000 * seconds / count:.0f} ms each")
    return lines


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=256)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--programs", type=int, default=256)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    lines = [*tool_lines(options.calls, options.threads), *program_lines(options.programs)]
    print("\n".join(lines))
    if options.record:
        results.write("agents", "calls_and_programs.txt", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
