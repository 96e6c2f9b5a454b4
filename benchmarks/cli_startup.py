"""Time of --help of each command: median of several runs after a warm-up, in seconds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from hybrid_rlhf.cli.main import COMMANDS, PROGRAM

RUNS = 5


def main() -> None:
    """Print one line per command."""
    for command in ("", *COMMANDS):
        words = [sys.executable, "-m", "hybrid_rlhf.cli.main", *filter(None, [command]), "--help"]
        seconds = []
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
        name = f"{PROGRAM} {command}"
        print(f"{name:24s} {statistics.median(seconds[1:]):.2f} s (of {RUNS}, max {max(seconds[1:]):.2f})")


if __name__ == "__main__":
    main()
