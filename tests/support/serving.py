"""`hybrid-rlhf serve` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

KEY = "a-key"


@contextmanager
def server_process(line: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, whose key is KEY, and its URL; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hybrid_rlhf.cli.main", "serve", *line, "--port", "0", "--api_key", "${SERVE_KEY}"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SERVE_KEY": KEY, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        started = re.fullmatch(r"serving \S+ on (http://127\.0\.0\.1:\d+)/v1\n", process.stdout.readline())
        assert started is not None
        yield process, started[1]
    finally:
        process.kill()
        process.wait()
