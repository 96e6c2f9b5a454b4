"""Rows of the contract to records, one adapter a step. A row that breaks the contract names file, line and column.

| step | columns |
|---|---|
| SFT | messages; prompt + completion; prompt + chosen; text |
| reward | prompt + chosen + rejected (the prompt may be implicit), margin; or prompt + responses + ranks |
| KTO, reward of labels | prompt + completion + label; or what the reward step takes, the better good, the worse bad |
| reward of steps | prompt + completions (the steps of one answer) + labels |
| PPO | prompt; or messages, whose last assistant turn is dropped; other columns go to reward functions |

Beside any of them `tools`: JSON schemas of the functions that the assistant may call. A message keeps all its keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.messages import Message, Tools, read_message, row_tools
from hybrid_rlhf.data.sources import Row, missing


@dataclass(frozen=True)
class Conversation:
    """What SFT learns from: messages, or plain text."""

    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    context: str = ""
    """Before the text, without loss."""
    tools: Tools | None = None


@dataclass(frozen=True)
class Preference:
    """Answers to one prompt and which is better than which."""

    prompt: list[Message]
    responses: list[list[Message]]
    pairs: list[tuple[int, int]]
    """(better, worse), indices of responses."""
    margins: list[float]
    """A pair's margin, 0 where none is given."""
    tools: Tools | None = None


@dataclass(frozen=True)
class Labelled:
    """Answers to one prompt, each good or bad by itself."""

    prompt: list[Message]
    responses: list[list[Message]]
    labels: list[bool]
    tools: Tools | None = None


@dataclass(frozen=True)
class Stepwise:
    """An answer in steps, each with how right it is."""

    prompt: list[Message]
    steps: list[str]
    labels: list[float]
    """In [0, 1], 1 is right."""
    tools: Tools | None = None


@dataclass(frozen=True)
class Prompt:
    """What PPO answers, and the row's other columns."""

    messages: list[Message]
    columns: dict[str, Any]
    """`tools` among them, as the row has it."""
    tools: Tools | None = None


def sft_row(place: str, row: Row) -> Conversation:
    """A row of step 1."""
    if "messages" in row:
        messages = _messages(place, row, "messages")
    elif "prompt" in row and ("completion" in row or "chosen" in row):
        answer = "completion" if "completion" in row else "chosen"
        prompt = _turns(place, row, "prompt", role="user")
        messages = prompt + _after(prompt, _turns(place, row, answer, role="assistant"))
    elif "chosen" in row and not isinstance(row["chosen"], str):
        messages = _messages(place, row, "chosen")
    elif "text" in row:
        return Conversation(text=_text(place, row, "text"))
    else:
        raise missing(place, row, ["messages", "prompt + completion", "prompt + chosen", "text"])
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(
            f"{place}: SFT learns from assistant turns, this conversation has none: add one or drop the row"
        )
    return Conversation(messages, tools=row_tools(place, row))


def preference_row(place: str, row: Row) -> Preference:
    """A row of step 2."""
    if "responses" in row and "ranks" in row:
        return _ranked(place, row)
    if "chosen" not in row or "rejected" not in row:
        raise missing(place, row, ["prompt + chosen + rejected", "prompt + responses + ranks"])
    if row["chosen"] == row["rejected"]:
        raise UserError(
            f"{place}: columns 'chosen' and 'rejected' are equal: a pair needs a better answer, drop the row"
        )
    chosen, rejected = (_turns(place, row, name, role="assistant") for name in ("chosen", "rejected"))
    if "prompt" in row:
        prompt = _turns(place, row, "prompt", role="user")
        chosen, rejected = _after(prompt, chosen), _after(prompt, rejected)
    else:
        shared = _shared_prefix(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not all(answer and answer[-1]["role"] == "assistant" for answer in (chosen, rejected)):
        raise UserError(
            f"{place}: one of 'chosen' and 'rejected' has no answer after the prompt: add it or drop the row"
        )
    margin = row.get("margin", 0.0)
    if not is_number(margin):
        raise UserError(f"{place}: column 'margin' is a number, got {margin!r}: mend the row")
    return Preference(prompt, [chosen, rejected], [(0, 1)], [float(margin)], row_tools(place, row))


def labelled_row(place: str, row: Row) -> Labelled:
    """A row of answers that are good or bad: one with its label, or those of pairs."""
    if "label" not in row:
        record = preference_row(place, row)
        better, worse = ({pair[side] for pair in record.pairs} for side in (0, 1))
        places = sorted(better ^ worse)  # one that is above some and below others is neither
        responses = [record.responses[i] for i in places]
        return Labelled(record.prompt, responses, [i in better for i in places], record.tools)
    if "prompt" not in row or "completion" not in row:
        raise missing(place, row, ["prompt + completion + label", "prompt + chosen + rejected"])
    label = row["label"]
    if label not in (0, 1):
        raise UserError(f"{place}: column 'label' is true (good) or false (bad), got {label!r}: mend the row")
    prompt = _turns(place, row, "prompt", role="user")
    answer = _after(prompt, _turns(place, row, "completion", role="assistant"))
    if not answer or answer[-1]["role"] != "assistant":
        raise UserError(f"{place}: column 'completion' has no answer after the prompt: add it or drop the row")
    return Labelled(prompt, [answer], [bool(label)], row_tools(place, row))


def stepwise_row(place: str, row: Row) -> Stepwise:
    """A row of the steps of an answer (stepwise supervision)."""
    if any(name not in row for name in ("prompt", "completions", "labels")):
        raise missing(place, row, ["prompt + completions + labels"])
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not isinstance(labels, list) or not steps or len(steps) != len(labels):
        raise UserError(f"{place}: columns 'completions' and 'labels' are lists of one length: mend the row")
    texts = [_text(place, {"completions": step}, "completions") for step in steps]
    wrong = [label for label in labels if not (isinstance(label, bool) or is_number(label)) or not 0 <= label <= 1]
    if wrong:
        raise UserError(f"{place}: column 'labels' holds true, false or numbers in [0, 1], got {wrong[0]!r}: mend it")
    prompt = _turns(place, row, "prompt", role="user")
    return Stepwise(prompt, texts, [float(label) for label in labels], row_tools(place, row))


def head_place(place: str, row: Row, heads: Sequence[str]) -> int:
    """Which of several scores a row teaches; the first where it does not say."""
    name = row.get("head", heads[0])
    if name not in heads:
        raise UserError(f"{place}: column 'head' is one of {', '.join(heads)}, got {name!r}: mend the row")
    return heads.index(name)


def prompt_row(place: str, row: Row) -> Prompt:
    """A row of step 3."""
    if "prompt" in row:
        used, messages = "prompt", _turns(place, row, "prompt", role="user")
    elif "messages" in row:
        used, messages = "messages", _messages(place, row, "messages")
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise UserError(f"{place}: column 'messages' has only an answer: add the prompt or drop the row")
    else:
        raise missing(place, row, ["prompt", "messages"])
    columns = {name: value for name, value in row.items() if name != used}
    return Prompt(messages, columns, row_tools(place, row))


def ptx_row(place: str, row: Row) -> Conversation:
    """A row of pretraining text, or a conversation."""
    return Conversation(text=_text(place, row, "text")) if "text" in row else sft_row(place, row)


def _ranked(place: str, row: Row) -> Preference:
    """All pairs of a ranked list, a lower rank being better; equal ranks make no pair (InstructGPT, section 3.5)."""
    if "prompt" not in row:
        raise missing(place, row, ["prompt + responses + ranks"])
    responses, ranks = row["responses"], row["ranks"]
    if not isinstance(responses, list) or not isinstance(ranks, list) or len(responses) != len(ranks):
        raise UserError(f"{place}: columns 'responses' and 'ranks' are lists of one length: mend the row")
    if not all(is_number(rank) for rank in ranks):
        raise UserError(f"{place}: column 'ranks' holds numbers, got {ranks!r}: mend the row")
    prompt = _turns(place, row, "prompt", role="user")
    answers = [
        _after(prompt, _turns(place, {"responses": answer}, "responses", role="assistant")) for answer in responses
    ]
    if not all(answer and answer[-1]["role"] == "assistant" for answer in answers):
        raise UserError(f"{place}: column 'responses' holds answers, one ends with another's turn: mend the row")
    pairs = [
        (i, j) if ranks[i] < ranks[j] else (j, i) for i, j in combinations(range(len(ranks)), 2) if ranks[i] != ranks[j]
    ]
    if not pairs:
        raise UserError(f"{place}: column 'ranks' makes no pair, all are equal: drop the row")
    if any(answers[better] == answers[worse] for better, worse in pairs):
        raise UserError(f"{place}: column 'responses' ranks one answer above itself: drop the double")
    return Preference(prompt, answers, pairs, [0.0] * len(pairs), row_tools(place, row))


def _turns(place: str, row: Row, column: str, *, role: str) -> list[Message]:
    """A column that is text, one turn of the given role, or messages."""
    if isinstance(row[column], str):
        return [{"role": role, "content": _text(place, row, column)}]
    return _messages(place, row, column)


def _text(place: str, row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column!r} is text, got a {type(value).__name__}: mend the row")
    if not value.strip():
        raise UserError(f"{place}: column {column!r} is empty: fill it or drop the row")
    return value


def _messages(place: str, row: Row, column: str) -> list[Message]:
    value = row[column]
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{place}: column {column!r} is text or a list of messages, got "
            f"{'an empty list' if value == [] else 'a ' + type(value).__name__}: mend the row"
        )
    return [read_message(f"{place}: column {column!r}", message) for message in value]


def _after(prompt: Sequence[Message], answer: list[Message]) -> list[Message]:
    """An answer without the prompt that some data sets repeat before it."""
    return answer[len(prompt) :] if answer[: len(prompt)] == list(prompt) else answer


def _shared_prefix(first: Sequence[Message], second: Sequence[Message]) -> int:
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    return shared


def is_number(value: object) -> bool:
    """Finite: Python's JSON reader lets NaN through, and one makes the loss of its whole batch NaN."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False
