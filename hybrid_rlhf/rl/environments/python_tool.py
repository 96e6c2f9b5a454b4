"""Environment with Python as a tool: programs of the actor run in the sandbox.

The actor writes `<python>print(12 * 7)</python>` and observes the output, or why the program failed, in as many turns
as the config allows. It ends with `<answer>84</answer>`, which is correct if it equals the row's column `answer`, as
a number or as a text. Programs do not share state.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.loop.sandboxes import build_sandbox
from hybrid_rlhf.rl.environments.environment import StepResult, with_instruction
from hybrid_rlhf.runtime.sandbox.process import Sandbox, SandboxResult

INSTRUCTION = (
    "Write <python>program</python> to run a Python program and read what it prints. Give the result as "
    "<answer>result</answer>."
)


class PythonTool:
    """One problem, with programs to solve it."""

    stop_strings = ("</python>", "</answer>")

    def __init__(self, *, sandbox: Mapping[str, Any] | None = None, call_reward: float = 0.0) -> None:
        """Take settings of the sandbox, and the reward of each program that succeeds; a correct answer has reward 1."""
        self._sandbox = _shared_sandbox(json.dumps(dict(sandbox or {}), sort_keys=True))
        self._call_reward = call_reward

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the prompt of the row with the instruction."""
        self._answer = str(row["answer"])
        return with_instruction(row["prompt"], INSTRUCTION)

    def step(self, completion: str) -> StepResult:
        """Run the last program, or end the episode with the answer."""
        answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
        if answers:
            return StepResult(None, float(is_equal(answers[-1], self._answer)), True)
        programs = re.findall(r"<python>(.*?)</python>", completion, re.DOTALL)
        if not programs:
            return StepResult("Write <python>program</python> or <answer>result</answer>.", 0.0, False)
        result = self._sandbox.run(programs[-1])
        return StepResult(_observation(result), self._call_reward if result.succeeded else 0.0, False)


@functools.cache
def _shared_sandbox(settings: str) -> Sandbox:
    """The sandbox of all episodes of a process."""
    return build_sandbox(SandboxConfig(**json.loads(settings)))


def _observation(result: SandboxResult) -> str:
    """What the program wrote, and why it failed."""
    parts = [result.stdout.rstrip()]
    if result.truncated:
        parts.append("[output truncated]")
    if result.failure is not None:
        parts.append(f"[{result.failure}]")
    return "\n".join(filter(None, parts)) or "[no output]"


def is_equal(answer: str, expected: str) -> bool:
    """Return True if an answer is the expected number or text."""
    try:
        return float(answer.strip().replace(",", "")) == float(expected.strip().replace(",", ""))
    except ValueError:
        return answer.strip() == expected.strip()
