"""A worked example: the actor may ask a calculator before it answers.

It writes `<calc>12 * 7</calc>` and is told the value, as often as turns allow, and ends with `<answer>84</answer>`,
which is right where it equals the row's column `answer`. Expressions are read as Python's syntax tree and computed node
by node: nothing is evaluated by name, and numbers stay small.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_rlhf.algorithms.environments.environment import Step, with_instruction
from hybrid_rlhf.data.messages import Message

INSTRUCTION = "Write <calc>expression</calc> to be told its value. Give the result as <answer>number</answer>."
_LONGEST, _LARGEST = 200, 1e15
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """One problem of arithmetic."""

    stop_strings = ("</calc>", "</answer>")

    def __init__(self, *, call_reward: float = 0.0) -> None:
        """Args: what each expression that can be computed earns; a right answer earns 1."""
        self._call_reward = call_reward

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's prompt with the instruction."""
        self._answer = _number(str(row["answer"]))
        if self._answer is None:
            raise ValueError(f"the column answer must be a number, got {row['answer']!r}")
        return with_instruction(row["prompt"], INSTRUCTION)

    def step(self, completion: str) -> Step:
        """The value of the last expression, or the end."""
        answered = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
        if answered:
            return Step(None, float(_number(answered[-1]) == self._answer), True)
        asked = re.findall(r"<calc>(.*?)</calc>", completion, re.DOTALL)
        if not asked:
            return Step("Write <calc>expression</calc> or <answer>number</answer>.", 0.0, False)
        try:
            return Step(f"{compute(asked[-1]):.12g}", self._call_reward, False)
        except ValueError as error:
            return Step(f"error: {error}", 0.0, False)


def compute(expression: str) -> float:
    """The value of an expression of numbers, + - * / // % ** and brackets.

    Raises:
        ValueError: for anything else, and where there is no value or a very large one.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
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
        left = float(left)  # overflows at once, where an int would grow without end
    try:
        return _checked(_BINARY[type(node.op)](left, right))
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _checked(value: object) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:  # (-8) ** 0.5 is complex
        raise ValueError("too large, or no real number")
    return value


def _number(text: str) -> float | None:
    try:
        return float(text.strip().replace(",", ""))
    except ValueError:
        return None
