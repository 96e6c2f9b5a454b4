"""`hybrid-rlhf serve` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

KEY = "a-key"


@contextmanager
def server_process(
    line: Sequence[str], *, before: str = "", errors: IO[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, whose key is KEY, and its URL; killed at the end.

    Args:
        line: of the command.
        before: Python code that the process runs first.
        errors: where its standard error goes; none: that of the test.
    """
    code = f"{before}\nimport sys\nfrom hybrid_rlhf.cli.main import main\nmain(['serve', *sys.argv[1:]])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *line, "--port", "0", "--api_key", "${SERVE_KEY}"],
        stdout=subprocess.PIPE,
        stderr=errors,
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
