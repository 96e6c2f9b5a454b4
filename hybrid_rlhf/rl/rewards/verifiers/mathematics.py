"""Answers compared with those of the data by the library math-verify, in the sandbox."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.reasoning import answer_of
from hybrid_rlhf.rl.rewards.verifiers.verdicts import BadRow, Judgement, Map, Verdict, failure_of
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.sandbox.process import Sandbox, SandboxResult

_START_SECONDS = 60.0
"""Time in which the library is imported."""
_BATCH = 64
"""Most completions of a process, since the import takes a second."""
_PROGRAM = Path(__file__).with_name("math_program.py")


class MathVerifier:
    """Finds the answer of a completion and compares it as a value: 1/2 is 0.5."""

    def __init__(self, sandbox: Sandbox, *, timeout_seconds: float, workers: int, is_local: bool) -> None:
        """Take where answers are compared, the time limit of each, and the number of processes.

        Raises:
            UserError: if the sandbox is local and math-verify is not installed.
        """
        if is_local and importlib.util.find_spec("math_verify") is None:
            raise UserError(
                "verifier math needs the library math-verify, which is not installed: pip install 'hybrid_rlhf[math]'"
            )
        self._sandbox = sandbox
        self._timeout_seconds = timeout_seconds
        self._workers = workers
        self._program = _PROGRAM.read_text()

    def __call__(self, completions: Sequence[str], expected: Sequence[Any], each: Map) -> list[Judgement]:
        """Judge completions by their expected answers, in batches of one process each."""
        pairs = [(str(right), answer_of(text)) for right, text in zip(expected, completions, strict=True)]
        size = min(_BATCH, math.ceil(len(pairs) / self._workers)) or 1
        batches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        return [verdict for verdicts in each(self._judge, batches) for verdict in verdicts]

    def _judge(self, pairs: Sequence[tuple[str, str]]) -> list[Judgement]:
        """Judge pairs; one that ends the process is not right, and the next process goes on behind it."""
        verdicts: list[Judgement] = []
        while len(verdicts) < len(pairs):
            left = pairs[len(verdicts) :]
            try:
                result = self._sandbox.run(
                    self._program,
                    stdin=json.dumps({"seconds": self._timeout_seconds, "pairs": left}),
                    timeout_seconds=_START_SECONDS + self._timeout_seconds * len(left),
                )
                lines = result.stdout.split("\n")[:-1]
                if not lines:  # an empty line comes first
                    raise BadRow(f"math-verify does not run in the sandbox: {result.failure}")
                verdicts += [_read(line, right) for line, (right, _) in zip(lines[1:], left, strict=False)]
            except Exception as error:  # noqa: BLE001 - a sandbox of the user may raise anything
                return [*verdicts, *[failure_of(error)] * (len(pairs) - len(verdicts))]
            if len(verdicts) < len(pairs):
                verdicts.append(_ended(result))
        return verdicts


def _read(line: str, right: str) -> Judgement:
    outcome, answer = json.loads(line)
    if outcome == "bad_row":
        return BadRow(f"the expected answer is no mathematical value, got {shortened(repr(right))}")
    return Verdict(float(outcome == "right"), outcome, shortened(answer))


def _ended(result: SandboxResult) -> Verdict:
    """The verdict on a pair that ended the process."""
    if result.timed_out or "Timeout (" in result.stderr:
        return Verdict(0.0, "timeout", "the comparison took longer than its time limit")
    return Verdict(0.0, "error", result.failure or "the comparison ended without a result")
