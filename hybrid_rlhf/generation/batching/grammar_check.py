"""Compiles untrusted grammars in processes that may be killed; run as a file, with llguidance alone.

llguidance's time and memory are not bounded by the length of a grammar: a few regular expressions with counted
repetitions take gigabytes a second. So this process reads the tokenizer, and forks for each grammar: the fork has its
own limit of memory, and ends at its limit of time or when the client has left. A compiled grammar cannot be passed
between processes; the caller compiles those that have stayed within the limits once more.

Frames on stdin and stdout are a length of 4 bytes and JSON. The first has the tokenizer and the limits; then one per
grammar, each with one answer: `bytes`, or `error`. A frame of length 0 cancels the grammar that is being compiled.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
from typing import Any


def read_frame(file: int) -> bytes | None:
    """The next frame; None at the end of the file."""
    header = _read(file, 4)
    return None if len(header) < 4 else _read(file, struct.unpack(">I", header)[0])


def write_frame(file: int, content: bytes) -> None:
    """Write a frame."""
    left = memoryview(struct.pack(">I", len(content)) + content)
    while left:
        left = left[os.write(file, left) :]


def _read(file: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(file, min(size, 2**20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _pages(column: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


def _compile(tokenizer: Any, source: str, memory_bytes: int) -> dict[str, Any]:
    from llguidance import LLMatcher

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _pages(0) + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resident = _pages(1)
    matcher = LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        return {"error": " ".join(matcher.get_error().split())[:300]}
    size = max(0, _pages(1) - resident)
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        return {"error": "no finite text matches it"}
    return {"bytes": size}


def _checked(tokenizer: Any, source: str, *, seconds: float, memory_bytes: int) -> dict[str, Any]:
    """The answer to a grammar, from a fork."""
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            write_frame(writing, json.dumps(_compile(tokenizer, source, memory_bytes)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        # stdin: a frame that cancels, or the end of the server
        ready, _, _ = select.select([reading, 0], [], [], seconds)
        answer = read_frame(reading) if reading in ready else None
        if answer is None:
            return {"error": f"it takes more than {seconds:g} s or {memory_bytes / 2**20:.0f} MiB to compile"}
        return dict(json.loads(answer))
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        os.close(reading)


def main() -> None:
    """Answer until stdin ends."""
    from llguidance import LLTokenizer

    given = json.loads(read_frame(0) or b"{}")
    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["stop"])
    while (frame := read_frame(0)) is not None:
        if frame:  # else it cancels what has been answered already
            write_frame(1, json.dumps(_checked(tokenizer, json.loads(frame), **given["limits"])).encode())


if __name__ == "__main__":
    main()
