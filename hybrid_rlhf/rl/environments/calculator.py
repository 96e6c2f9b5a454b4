"""Example environment: arithmetic problems with a calculator as a tool.

The actor writes `<calc>12 * 7</calc>` and observes the value, in as many turns as the config allows. It ends with
`<answer>84</answer>`, which is correct if it equals the row's column `answer`. Expressions are parsed to Python's
syntax tree and computed node by node, without evaluating names and with bounded numbers.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.rl.environments.environment import StepResult, with_instruction

INSTRUCTION = "Write <calc>expression</calc> to be told its value. Give the result as <answer>number</answer>."
_MAX_CHARACTERS = 200
_MAX_VALUE = 1e15
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """One arithmetic problem."""

    stop_strings = ("</calc>", "</answer>")

    def __init__(self, *, call_reward: float = 0.0) -> None:
        """Take the reward of each valid expression; a correct answer has reward 1."""
        self._call_reward = call_reward

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the prompt of the row with the instruction."""
        self._answer = _number(str(row["answer"]))
        if self._answer is None:
            raise ValueError(f"the column answer must be a number, got {row['answer']!r}")
        return with_instruction(row["prompt"], INSTRUCTION)

    def step(self, completion: str) -> StepResult:
        """Compute the last expression, or end the episode with the answer."""
        answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
        if answers:
            return StepResult(None, float(_number(answers[-1]) == self._answer), True)
        expressions = re.findall(r"<calc>(.*?)</calc>", completion, re.DOTALL)
        if not expressions:
            return StepResult("Write <calc>expression</calc> or <answer>number</answer>.", 0.0, False)
        try:
            return StepResult(f"{compute(expressions[-1]):.12g}", self._call_reward, False)
        except ValueError as error:
            return StepResult(f"error: {error}", 0.0, False)


def compute(expression: str) -> float:
    """The value of an expression of numbers, + - * / // % ** and parentheses.

    Raises:
        ValueError: for anything else, for undefined values and for very large ones.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"longer than {_MAX_CHARACTERS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("not an expression") from None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if not isinstance(node, ast.BinOp) or type(node.op) not in _BINARY:
        raise ValueError(f"{type(node).__name__} is no arithmetic")
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow):
        left = float(left)  # a float raises OverflowError, an int would grow without bound
    try:
        return _checked(_BINARY[type(node.op)](left, right))
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _checked(value: object) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= _MAX_VALUE:  # (-8) ** 0.5 is complex
        raise ValueError("too large, or no real number")
    return value


def _number(text: str) -> float | None:
    try:
        return float(text.strip().replace(",", ""))
    except ValueError:
        return None
