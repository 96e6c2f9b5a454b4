"""Compiles untrusted grammars in processes that may be killed; run as a file, with llguidance alone.

llguidance's time and memory are not bounded by the length of a grammar: a few regular expressions with counted
repetitions take gigabytes a second. So this process reads the tokenizer, and forks for each grammar: the fork has its
own limit of memory, and ends at its limit of time or when the client has left. A compiled grammar cannot be passed
between processes; the caller compiles those that have stayed within the limits once more.

Messages over a connection, whose file descriptor is the argument, are JSON. The first has the tokenizer and the limits;
then one per grammar, each with one answer: `bytes`, or `error`. An empty message cancels the grammar that is being
compiled.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any


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


def _checked(server: Connection, tokenizer: Any, source: str, *, seconds: float, memory_bytes: int) -> dict[str, Any]:
    """The answer to a grammar, from a fork."""
    reading, writing = Pipe(duplex=False)
    fork = os.fork()
    if fork == 0:
        try:
            writing.send_bytes(json.dumps(_compile(tokenizer, source, memory_bytes)).encode())
        finally:
            os._exit(0)
    writing.close()
    try:
        # from the server: a message that cancels, or its end
        if reading in wait([reading, server], seconds):
            return dict(json.loads(reading.recv_bytes()))
    except EOFError:  # it was killed
        pass
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        reading.close()
    return {"error": f"it takes more than {seconds:g} s or {memory_bytes / 2**20:.0f} MiB to compile"}


def main() -> None:
    """Answer until the server ends."""
    from llguidance import LLTokenizer

    server = Connection(int(sys.argv[1]))
    given = json.loads(server.recv_bytes())
    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["stop"])
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            if source := server.recv_bytes():  # else it cancels what has been answered already
                answer = _checked(server, tokenizer, json.loads(source), **given["limits"])
                server.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
