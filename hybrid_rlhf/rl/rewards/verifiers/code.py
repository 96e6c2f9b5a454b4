"""Programs judged by tests: pairs of standard input and output, or assertions.

A test passes only if the program ends with status 0 and, with assertions, if the harness behind them says a word that
is drawn for each test: a program that ends early with status 0 does not pass. The program runs in the process of the
assertions, so one that inspects its caller can find the word; its expected outputs are not in the sandbox.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybrid_rlhf.rl.rewards.verifiers.verdicts import BadRow, Judgement, Map, Verdict, answer_of
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.sandbox.process import Sandbox

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_HARNESS = """
import os, sys


def main():
    word, out, names = sys.stdin.readline(), os.dup(1), {"__name__": "solution"}
    for name in ("solution.py", "test.py"):
        with open(name) as file:
            code = compile(file.read(), name, "exec")
        exec(code, names)
    os.write(out, word.encode())


main()
"""


class Test(NamedTuple):
    """One test of a program."""

    assertions: str | None = None
    """Python that raises if the program is wrong; None: the output is compared."""
    stdin: str = ""
    stdout: str = ""


class CodeVerifier:
    """Runs the last fenced block of a completion against the tests of its row."""

    def __init__(self, sandbox: Sandbox, *, partial_score: bool) -> None:
        """Take where programs run, and whether the score is the fraction of tests that pass."""
        self._sandbox = sandbox
        self._partial = partial_score

    def __call__(self, completions: Sequence[str], expected: Sequence[Any], each: Map) -> list[Judgement]:
        """Judge completions by their tests."""
        return each(lambda pair: self._judge(*pair), list(zip(completions, expected, strict=True)))

    def _judge(self, completion: str, expected: object) -> Judgement:
        try:
            tests = read_tests(expected)
        except BadRow as error:
            return error
        program = read_program(completion)
        if program is None:
            return Verdict(0.0, "no_answer", "it has no fenced block of code")
        passed = 0
        first_failure: Verdict | None = None
        for number, test in enumerate(tests, start=1):
            verdict = self._run(program, test)
            if verdict.outcome == "right":
                passed += 1
                continue
            first_failure = first_failure or verdict._replace(detail=f"test {number} of {len(tests)}: {verdict.detail}")
            if not self._partial:
                break
        if first_failure is None:
            return Verdict(1.0, "right")
        return first_failure._replace(score=passed / len(tests) if self._partial else 0.0)

    def _run(self, program: str, test: Test) -> Verdict:
        if test.assertions is None:
            result = self._sandbox.run(program, stdin=test.stdin)
            is_right = not result.truncated and _lines(result.stdout) == _lines(test.stdout)
            wrong = f"it wrote {shortened(repr(result.stdout))}"
        else:
            word = secrets.token_hex(16)
            files = {"solution.py": program, "test.py": test.assertions}
            result = self._sandbox.run(_HARNESS, stdin=f"{word}\n", files=files)
            is_right = result.truncated or result.stdout.endswith(f"{word}\n")
            wrong = "it ended before its test"
            if "AssertionError" in result.stderr.rpartition("\nTraceback")[2] and not result.timed_out:
                return Verdict(0.0, "wrong", result.failure or "an assertion fails")
        if result.failure is not None:
            return Verdict(0.0, "timeout" if result.timed_out else "error", result.failure)
        return Verdict(1.0, "right") if is_right else Verdict(0.0, "wrong", wrong)


def read_program(completion: str) -> str | None:
    """The last fenced block after the reasoning; None without one."""
    blocks = _BLOCK.findall(answer_of(completion))
    return blocks[-1] if blocks else None


def read_tests(value: object) -> list[Test]:
    """Tests of a row.

    A text is JSON of one of the other forms, or Python with assertions; a list has such texts, or mappings with
    `input` and `output`; a mapping has the lists `inputs` and `outputs`, of the same length.

    Raises:
        BadRow: for anything else, or no test.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return [Test(assertions=str(value))]
    if isinstance(value, Mapping) and not value.get("fn_name"):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            value = [{"input": stdin, "output": stdout} for stdin, stdout in zip(inputs, outputs, strict=True)]
    if isinstance(value, list) and value and all(map(_is_test, value)):
        return [
            Test(assertions=test) if isinstance(test, str) else Test(None, _text(test["input"]), _text(test["output"]))
            for test in value
        ]
    raise BadRow(
        "tests are a text or a list of texts with assertions, a list of {input, output}, or {inputs, outputs}, got "
        f"{shortened(repr(value))}"
    )


def _is_test(test: object) -> bool:
    return isinstance(test, str) or (isinstance(test, Mapping) and {"input", "output"} <= set(test))


def _text(value: object) -> str:
    """A text, or the lines of a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Lines without the white space at their ends and at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
