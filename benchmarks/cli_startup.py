"""How long --help of each entry point takes: the median of several runs after a warm-up, in seconds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRY_POINTS = [
    "train.py", "training/step1_sft/main.py", "training/step2_reward/main.py", "training/step3_ppo/main.py",
    "inference/chat.py", "inference/generate.py",
]  # fmt: skip
RUNS = 5


def main() -> None:
    """Print a line an entry point."""
    for entry in ENTRY_POINTS:
        seconds = []
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            subprocess.run([sys.executable, str(ROOT / entry), "--help"], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
        print(f"{entry:34s} {statistics.median(seconds[1:]):.2f} s (of {RUNS}, max {max(seconds[1:]):.2f})")


if __name__ == "__main__":
    main()
