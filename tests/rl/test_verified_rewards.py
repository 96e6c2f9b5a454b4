"""Verifiers of code and of mathematics as reward components: verdicts, reasons, the pool of workers, config errors."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.cli.runs.checks import _check_user_code, load_user_code
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.loop.sandboxes import build_sandbox
from hybrid_rlhf.rl.rewards import CompletionTexts, Reward
from hybrid_rlhf.rl.rewards.verifiers.code import Test as CodeTest
from hybrid_rlhf.rl.rewards.verifiers.code import read_program, read_tests
from hybrid_rlhf.rl.rewards.verifiers.component import VerifierReward
from hybrid_rlhf.rl.rewards.verifiers.verdicts import BadRow, Verdict
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.sandbox.process import SandboxResult
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.ranks import run_ranks
from tests.support.rl import COMPLETIONS, rewarded, rollout_of_rows

CPU = torch.device("cpu")
ADD = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = [{"input": "1 2", "output": "3\n"}, {"input": "2 5\n", "output": "7"}]
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(2, 5) == 7"]


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def texts_of(completions: list[str], **columns: list[Any]) -> CompletionTexts:
    return CompletionTexts([[{"role": "user", "content": "?"}]] * len(completions), completions, columns)


def verifier(kind: str, **settings: Any) -> VerifierReward:
    limits = SandboxConfig(**{"timeout_seconds": 10.0} | settings.pop("sandbox", {}))
    return VerifierReward(RewardComponentConfig(verifier=kind, sandbox=limits, **settings), device=CPU)


@pytest.fixture(scope="module")
def code() -> VerifierReward:
    return verifier("code", workers=4)


@pytest.fixture(scope="module")
def partly() -> VerifierReward:
    return verifier("code", workers=4, partial=True)


@pytest.mark.parametrize(
    ("program", "tests", "score", "outcome", "detail"),
    [
        (ADD, PAIRS, 1.0, "right", ""),
        (ADD, {"inputs": ["1 2", ["4 4", ""]], "outputs": ["3", ["8", ""]]}, 1.0, "right", ""),
        (ADD, json.dumps(PAIRS), 1.0, "right", ""),
        ("def add(a, b): return a + b", ASSERTIONS, 1.0, "right", ""),
        ("def add(a, b): return a + b", "\n".join(ASSERTIONS), 1.0, "right", ""),
        ("def add(a, b): return 3", ASSERTIONS, 0.5, "wrong", "test 2 of 2: exit status 1: AssertionError"),
        ("print(3)", PAIRS, 0.5, "wrong", "test 2 of 2: it wrote '3\\n'"),
        ("def add(a, b): return c", ASSERTIONS, 0.0, "error", "test 1 of 2: exit status 1: NameError: name 'c' is not"),
        ("print(3)\nprint(7)\nraise SystemExit(1)", PAIRS, 0.0, "error", "test 1 of 2: exit status 1"),
        ("print(1 +", PAIRS, 0.0, "error", "test 1 of 2: exit status 1: SyntaxError"),
        ("print('3' + ' ' * 2 ** 22)", PAIRS[:1], 0.0, "wrong", "test 1 of 1: it wrote"),
        (f"import sys\nsys.stderr.write('x' * 2 ** 21)\n{ADD}", PAIRS, 1.0, "right", ""),
        ("x = bytearray(2 ** 40)", PAIRS[:1], 0.0, "error", "test 1 of 1: it needed more memory than its limit"),
    ],
)
def test_programs_are_judged_by_their_tests(
    code: VerifierReward, partly: VerifierReward, program: str, tests: Any, score: float, outcome: str, detail: str
) -> None:
    verdict = partly.score(texts_of([fenced(program)], tests=[tests])).verdicts[0]
    assert (verdict.score, verdict.outcome) == (score, outcome)
    assert verdict.detail.startswith(detail)
    assert code.score(texts_of([fenced(program)], tests=[tests])).values == [float(score == 1)]


def test_a_program_that_does_not_end_is_told_from_a_wrong_one() -> None:
    part = verifier("code", sandbox={"timeout_seconds": 1.0})
    verdict = part.score(texts_of([fenced("while True: pass")], tests=[PAIRS])).verdicts[0]
    assert verdict == Verdict(0.0, "timeout", "test 1 of 2: it took longer than its time limit")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import sys\nclass Quiet:\n    write = flush = lambda *_: None\nsys.stdout = Quiet()\nsys.exit()",
        "import builtins\nbuiltins.exec = lambda *_: None\nimport os; os._exit(0)",
        "import sys\nprint('x' * 2_000_000); sys.exit()",
        "import os, sys\nsys.stderr.write('x' * 3_000_000); os._exit(0)",
        "import os\nos.write(1, b'x' * 3_000_000); os._exit(0)",
        "import os\nfor fd in 4, 1: os.write(fd, b'x' * 3_000_000)\nos._exit(0)",
        "import os, sys\nos.write(1, sys.stdin.read().encode()); os._exit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
    ],
)
def test_a_program_that_ends_early_does_not_pass(code: VerifierReward, program: str) -> None:
    """With the exit status alone each of these has a full reward."""
    verdict = code.score(texts_of([fenced(program)], tests=[ASSERTIONS])).verdicts[0]
    assert verdict == Verdict(0.0, "wrong", "test 1 of 2: it ended before its test")


FORGERIES = [
    "import os\nos.unlink('test.py'); open('test.py', 'w').close()",
    "import builtins\nbuiltins.exec = lambda *_: None",
    "import builtins\nreal = compile\nbuiltins.compile = lambda text, *rest: real('', *rest)",
    "import os, sys\nfor x in sys._getframe(1).f_locals.values(): os.write(1, str(x).encode())\nos._exit(0)",
    "import os\nos.write(1, open('/proc/self/environ', 'rb').read() + open('program', 'rb').read()); os._exit(0)",
    "import sys\nsys.excepthook = lambda *_: None",
    "import os\nos.rename('program', 'test.py'); open('program', 'w').close()",
    "import re\nvalue = int(re.search('== (.*)', open('test.py').read())[1])\ndef add(a, b): return value",
    "import builtins, io\nbuiltins.open = lambda *_, **__: io.StringIO('')\ndef add(a, b): return 0",
    "import os\ntry: os.lseek(0, 0, 0)\nfinally: os.write(1, os.read(0, 64)); os._exit(0)",
    "import sys\nsys.settrace(lambda *_: None)\ndef add(a, b): return 0",
    "import os\nif os.fork(): os._exit(0)\ndef add(a, b): return 3",
    "import builtins\nbuiltins.AssertionError = None\ndef add(a, b): return 0",
    "__builtins__ = {}\ndef add(a, b): return 0",
    "import os, sys\nif not sys.flags.optimize: os.execv(sys.executable, [sys.executable, '-O', 'program'])",
    "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "def add(a, b): raise SystemExit(0)",
    "import signal, os\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0)); signal.alarm(1)\nwhile True: pass",
    "import os\nos.dup2(2, 1); os.write(1, b'0123456789abcdef'); os._exit(0)",
    "import sys\nsys.unraisablehook = sys.excepthook = print\nclass A:\n    def __del__(self): raise KeyError\nA()",
    "import os\nos.write = lambda *_: 64\nos.read = lambda *_: b''\ndef add(a, b): return 0",
]


def test_forgeries_score_nothing(code: VerifierReward) -> None:
    """Each replaces or leaves what judges it; one once read the expected value in the file of the test. The tests are
    read before the program runs, and the word after they have passed."""
    scores = code.score(texts_of([fenced(program) for program in FORGERIES], tests=[ASSERTIONS] * len(FORGERIES)))
    assert scores.values == [0.0] * len(FORGERIES), [FORGERIES[i] for i, value in enumerate(scores.values) if value]


@pytest.mark.parametrize(
    "more",
    [
        "print('debug')",
        "print('x' * 2_000_000)",
        "import sys\nsys.stderr.write('x' * 2_000_000)",
        "import atexit\natexit.register(print, 'bye')",
        "import sys\nsys.stderr.write('no AssertionError here\\n')",
        "import traceback\ntry: assert 0\nexcept AssertionError: traceback.print_exc()",
        "import sys\nsys.stdin.read()",
        "import os\nos.fork()",
    ],
)
def test_what_else_a_right_program_does_is_no_matter(code: VerifierReward, more: str) -> None:
    scores = code.score(texts_of([fenced(f"{more}\ndef add(a, b): return a + b")], tests=[ASSERTIONS]))
    assert scores.verdicts[0] == Verdict(1.0, "right")


def test_the_last_block_after_the_reasoning_is_the_program() -> None:
    assert read_program("```python\nx = 1\n```\nbetter\n```py\nx = 2\n```") == "x = 2\n"
    assert read_program("```\nx = 1\n```") == "x = 1\n"
    assert read_program("<think>```python\nx = 1\n```</think> no code") is None
    assert read_program("x = 1") is None and read_program("```python\nx = 1") is None


def test_rows_without_tests_have_no_score_and_invalid_ones_fail(code: VerifierReward) -> None:
    """A row of another task has no opinion; an error of the data must not teach as a wrong program."""
    assert read_tests(["assert 1"]) == [CodeTest("assert 1")]
    assert read_tests([{"input": 1, "output": [2, 3]}]) == [CodeTest(None, "1", "2\n3")]
    invalid: list[Any] = [
        *([], 3, [1], [{"input": "1"}], {"inputs": ["1"]}, {"inputs": None, "outputs": None}),
        {"inputs": ["1", "2"], "outputs": ["1"]},
        {"inputs": [[1]], "outputs": [2], "fn_name": "f"},
    ]
    for value in invalid:
        with pytest.raises(BadRow, match="tests are a text or a list of texts"):
            read_tests(value)
    scores = code.score(texts_of(["no code"] * 3 + [fenced(ADD)], tests=[None, 3, PAIRS, PAIRS]))
    assert scores.values == [None, None, 0.0, 1.0] and scores.verdicts[2].outcome == "no_answer"
    assert list(scores.failures) == [1] and scores.failures[1].endswith("got 3")
    assert code.score(texts_of(["no code"])).values == [None]


class Counted:
    """A sandbox that counts the programs that run at once; the first `meet` of them wait for each other."""

    def __init__(self, config: SandboxConfig, *, meet: int = 0) -> None:
        self.lock = threading.Lock()
        self.running = self.most = self.calls = 0
        self.meet = meet
        self.met = threading.Barrier(meet or 1)

    def run(self, program: str, **_: Any) -> SandboxResult:
        with self.lock:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
            waits = self.calls <= self.meet
        if waits:
            self.met.wait(60)
        with self.lock:
            self.running -= 1
        return SandboxResult(0, "1" if "right" in program else "2", "")


class Failing(Counted):
    """A pool that is overloaded by programs with a word in them or in their input."""

    def run(self, program: str, *, stdin: str = "", **more: Any) -> SandboxResult:
        if "overload" in program + stdin:
            raise ConnectionError("pool answered 503")
        if "garbled" in stdin:
            return SandboxResult(0, "\nno JSON\n", "")
        return SandboxResult(0, '\n["right", "1"]\n' if "pairs" in stdin else "1", "")


class Runless:
    """No sandbox."""

    def __init__(self, config: SandboxConfig, *, width: int) -> None:
        pass


def test_the_pool_has_its_width_and_a_failed_test_ends_a_program() -> None:
    part = verifier("code", workers=8, sandbox={"kind": f"{__name__}:Counted", "options": {"meet": 8}})
    sandbox: Any = part._verifier._sandbox  # type: ignore[attr-defined]
    tests = [{"input": "", "output": "1"}] * 3
    scores = part.score(texts_of([fenced("other"), fenced("right")] * 32, tests=[tests] * 64))
    assert scores.values == [0.0, 1.0] * 32
    assert sandbox.most == 8 and sandbox.calls == 32 * 1 + 32 * 3


def test_an_error_of_the_sandbox_is_a_failure_of_its_completions() -> None:
    """It would end the run on one rank, whatever on_failure says, while the others wait."""
    sandbox = {"kind": f"{__name__}:Failing"}
    part = verifier("code", sandbox=sandbox)
    scores = part.score(texts_of([fenced("good"), fenced("overload")], tests=[[{"input": "", "output": "1"}]] * 2))
    assert scores.values == [1.0, None] and list(scores.failures) == [1]
    assert scores.failures[1].startswith("the sandbox fails: it raised ConnectionError: pool answered 503")
    part = verifier("math", sandbox=sandbox, workers=4)
    scores = part.score(texts_of(["1", "overload", "1", "garbled"], answer=["1", "1", "1", "1"]))
    assert scores.values == [1.0, None, 1.0, None] and list(scores.failures) == [1, 3]


def test_a_class_of_the_user_is_a_sandbox() -> None:
    for name, rule in (
        ("Counted", r"takes the config and sandbox.options \{'width': 1\}, it fails"),
        ("Runless", "a sandbox must have run"),
    ):
        with user_error(rule):
            build_sandbox(SandboxConfig(kind=f"{__name__}:{name}", options={"width": 1}))


def on_two_ranks(world: World) -> dict[str, float]:
    """Rank 0 has rows 0, 2 and 3, rank 1 has rows 1 and 4; rank 1 alone has a program that is right, and a row without
    tests."""
    micro: list[list[int | None]] = [[0, 2], [3]] if world.rank == 0 else [[1, 4], [None]]
    part = verifier("code", sandbox={"kind": f"{__name__}:Counted"})
    completions = [fenced("wrong"), fenced("right"), "none", fenced("wrong"), "none"]
    tests: list[Any] = [[{"input": "", "output": "1"}]] * 4 + [None]
    texts = CompletionTexts(COMPLETIONS.prompts, completions, {"tests": tests})
    return rewarded(Reward([part], world), rollout_of_rows(), micro, texts).metrics


def test_reasons_are_counted_over_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert first == second
    shares = {name.rpartition("/")[2]: value for name, value in first.items() if not name.endswith("std")}
    assert shares == pytest.approx({"mean": 0.25, "wrong": 0.5, "no_answer": 0.25, "error": 0.0, "timeout": 0.0})


def test_columns_and_libraries_are_checked_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1?", "solution": "2"}) + "\n")
    words = ["--algorithm", "grpo", "--model.path", "m", "--data.sources", str(rows), "--reward.components"]
    config = parse_config(RLConfig, [*words, "[{verifier: code}]"])
    with user_error("reward component code needs the column tests, the data has prompt, solution: rename"):
        load_user_code(config)
    load_user_code(parse_config(RLConfig, [*words, "[{verifier: code, column: solution, sandbox: {processes: 8}}]"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with user_error(r"math-verify, which is not installed: pip install 'hybrid_rlhf\[math\]'"):
        load_user_code(parse_config(RLConfig, [*words, "[{verifier: math, column: solution}]"]))


def test_columns_of_a_judge_are_checked_before_a_run_and_may_be_missing_in_some_rows(tmp_path: Path) -> None:
    """A server that is not up yet is not asked."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": "1+1?"}, {"prompt": "1+2?", "rules": "Be short."}, {"prompt": "1+3?"}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def check(judge: str) -> None:
        words = ["--algorithm", "grpo", "--model.path", "m", "--data.sources", str(rows)]
        step = parse_config(RLConfig, [*words, "--reward.components", f"[{{judge: {{{judge}}}}}]"])
        _check_user_code(step, tmp_path / "log")

    check("url: http://127.0.0.1:9/v1, rubric_column: rules")
    with user_error("reward component judge needs the column gold, the data has prompt, rules: rename or add it"):
        check("path: m, rubric_column: rules, mode: pairwise, against_column: gold")


MATH = [
    ("\\frac{1}{2}", "So it is $\\boxed{0.5}$.", "right"),
    ("1,234", "The answer is 1234.", "right"),
    ("$x^2 + 2x$", "\\boxed{x(x+2)}", "right"),
    ("[0, 1)", "\\boxed{(0, 1)}", "wrong"),
    ("72", "<think>\\boxed{72}</think> The answer is 71.", "wrong"),
    (3, "\\boxed{3.0}", "right"),
    ("5", "I do not know", "no_answer"),
]


@pytest.fixture(scope="module")
def mathematics() -> VerifierReward:
    pytest.importorskip("math_verify")
    return verifier("math", workers=2)


def test_answers_are_compared_as_values(mathematics: VerifierReward) -> None:
    columns, completions, outcomes = zip(*MATH, strict=True)
    scores = mathematics.score(texts_of([*completions, "1", "1"], answer=[*columns, None, ""]))
    assert [verdict.outcome for verdict in scores.verdicts.values()] == list(outcomes)
    assert scores.values == [*(float(outcome == "right") for outcome in outcomes), None, None]
    assert scores.failures == {len(MATH) + 1: "the expected answer is no mathematical value, got ''"}


def test_an_answer_that_hangs_costs_only_itself(mathematics: VerifierReward, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power in C ignores Python's signal handlers, and ends the process; the next one goes on behind it."""
    completions = ["\\boxed{4}", "$9^{9^{9^{9}}}$ is \\boxed{9^{9^{9}} \\bmod 7}", "\\boxed{5}"]
    program = (Path(__file__).parents[2] / "hybrid_rlhf/rl/rewards/verifiers/math_program.py").read_text()
    hanging = program.replace(
        "answer = parse(completion)", "answer = parse(completion) if 'bmod' not in completion else 9**9**9**2"
    )
    assert hanging != program
    monkeypatch.setattr(mathematics._verifier, "_program", hanging)
    monkeypatch.setattr(mathematics._verifier, "_timeout_seconds", 3.0)
    monkeypatch.setattr("hybrid_rlhf.rl.rewards.verifiers.mathematics._START_SECONDS", 600.0)
    begin = time.monotonic()
    scores = mathematics.score(texts_of(completions, answer=["4", "5", "5"]))
    assert [scores.verdicts[place].outcome for place in range(3)] == ["right", "timeout", "right"]
    assert time.monotonic() - begin < 300, "not by the limit of the process"


def test_a_sandbox_without_the_library_is_a_failure_not_a_wrong_answer() -> None:
    scores = verifier("math", sandbox={"command": ("sh",)}).score(texts_of(["1"], answer=["1"]))
    assert scores.failures[0].startswith("math-verify does not run in the sandbox: exit status")
