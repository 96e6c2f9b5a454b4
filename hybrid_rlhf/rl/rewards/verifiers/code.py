"""Programs judged by tests: pairs of standard input and output, or assertions.

A test passes only if the program ends with status 0 and, with assertions, if standard output is a word that is drawn
for each test. The harness keeps the standard streams to itself: the word stays in the pipe until the assertions have
passed, and what the program prints is discarded. Output that is cut never proves anything. The assertions run in the
process of the program, so one that looks for descriptors or returns objects that equal everything can forge a result;
expected outputs of pairs are not in the sandbox.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybrid_rlhf.data.chat.reasoning import answer_of
from hybrid_rlhf.rl.rewards.verifiers.verdicts import BadRow, Judgement, Map, Verdict, failure_of
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.sandbox.process import Sandbox

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_WIDTH = 16
"""Digits of a number of bytes."""
_HARNESS = f"""
import os


def text(size):
    data = b""
    while len(data) < size:
        block = os.read(0, size - len(data))
        if not block:
            raise EOFError("the sandbox closes standard input before its end")
        data += block
    return data


def main():
    run, read, write, names = exec, os.read, os.write, {{"__name__": "solution"}}
    with open("solution.py") as file:
        solution = compile(file.read(), "solution.py", "exec")
    test = compile(text(int(text({_WIDTH}))).decode(), "test.py", "exec")
    word, out, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    run(solution, names)
    run(test, names)
    write(out, read(word, 64))


main()
"""
"""Both texts are compiled, and functions bound, before the program can replace them. Standard input has the number of
bytes of the assertions, the assertions, which no file shows to the program, and the word."""


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
            return self._verdict(completion, read_tests(expected))
        except Exception as error:  # noqa: BLE001 - a sandbox of the user may raise anything
            return failure_of(error)

    def _verdict(self, completion: str, tests: Sequence[Test]) -> Verdict:
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
            word = secrets.token_hex(8)
            size = len(test.assertions.encode(errors="replace"))
            stdin = f"{size:{_WIDTH}}{test.assertions}{word}\n"
            result = self._sandbox.run(_HARNESS, stdin=stdin, files={"solution.py": program})
            is_right = result.stdout.strip() == word
            wrong = "it ended before its test"
        if result.failure is not None:
            is_wrong = test.assertions is not None and "AssertionError" in result.stderr.rpartition("\nTraceback")[2]
            return Verdict(0.0, "timeout" if result.timed_out else "wrong" if is_wrong else "error", result.failure)
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
