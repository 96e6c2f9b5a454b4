"""OpenAssistant: trees of messages, either one message per row with its `parent_id` or one tree per row with `replies`.

Source: Köpf et al. 2023, "OpenAssistant Conversations" (arXiv 2304.07327), and the data sets oasst1 and oasst2.
Assistant messages that reply to the same message have a `rank`, 0 for the best. Messages that are deleted, or failed
their review, are left out with their replies.

The rows of a tree may be anywhere in a source, so all messages are read before the first is written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hybrid_rlhf.configs.commands.data import RankedAs
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.preparation.conversion.records import LocatedRow, RankedCompletions, Record
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import column, is_number, text_column
from hybrid_rlhf.data.rows.problems import RowProblems

_ROLES = {"prompter": "user", "assistant": "assistant"}


@dataclass
class TreeMessage:
    """A message and its replies."""

    location: str
    message: Message
    rank: float | None
    is_left_out: bool
    parent: str | None = None
    """Id of the message that it replies to; None at the root of a tree."""
    replies: list[TreeMessage] = field(default_factory=list)

    def answers(self) -> list[TreeMessage]:
        """The replies of the assistant, the best first."""
        answers = [reply for reply in self.kept_replies() if reply.message["role"] == "assistant"]
        return sorted(answers, key=lambda reply: float("inf") if reply.rank is None else reply.rank)

    def kept_replies(self) -> list[TreeMessage]:
        """The replies that are not left out."""
        return [reply for reply in self.replies if not reply.is_left_out]


def tree_records(
    rows: Iterable[LocatedRow], ranked_as: RankedAs, problems: RowProblems
) -> Iterator[tuple[str, Record]]:
    """Ranked completions of each message that has them, or the conversations with the best answers."""
    messages: dict[str, TreeMessage] = {}
    for location, row in rows:
        with problems.collected():
            root = None if "message_id" in row else column(location, row, "prompt", dict, "a message with replies")
            found: dict[str, TreeMessage] = {}  # of a row, all or none
            for message in [row] if root is None else _nested(location, root):
                _add(found, location, message, others=messages)
            messages |= found
    for reply in messages.values():
        if reply.parent in messages:
            messages[reply.parent].replies.append(reply)
    roots = [message for message in messages.values() if message.parent is None]
    for lost in _outside(messages, roots):
        problems.add(UserError(f"{lost.location}: the parent {lost.parent!r} is in no tree: add it"))
    for root in roots:
        if not root.is_left_out:
            yield from _conversations(root) if ranked_as == "messages" else _comparisons(root)


def _outside(messages: Mapping[str, TreeMessage], roots: Sequence[TreeMessage]) -> Iterator[TreeMessage]:
    """The messages that no root leads to: their parent is missing, or they reply to each other in a circle."""
    waiting = list(roots)
    reached = set[int]()
    while waiting:
        message = waiting.pop()
        reached.add(id(message))
        waiting += message.replies
    return (message for message in messages.values() if id(message) not in reached)


def _add(messages: dict[str, TreeMessage], location: str, row: Row, *, others: Container[str]) -> None:
    """Add a message, whose id is new to these and to the others."""
    name = row.get("message_id")
    parent = row.get("parent_id")
    role = _ROLES.get(str(row.get("role")))
    if not isinstance(name, str) or name in messages or name in others or not isinstance(parent, str | None):
        raise UserError(
            f"{location}: a message has a 'message_id' of its own and the 'parent_id' of another, got {name!r} and "
            f"{parent!r}: fix the row"
        )
    if role is None:
        raise UserError(
            f"{location}: column 'role' must be prompter or assistant, got {row.get('role')!r}: fix the row"
        )
    message = {"role": role, "content": text_column(location, row, "text")}
    is_left_out = row.get("deleted") is True or row.get("review_result") is False
    messages[name] = TreeMessage(
        location, message, float(row["rank"]) if is_number(row.get("rank")) else None, is_left_out, parent
    )


def _nested(location: str, root: Row) -> Iterator[Row]:
    """The messages of a tree, each with its parent."""
    waiting: list[Row] = [{**root, "parent_id": None}]
    while waiting:
        message = waiting.pop(0)
        yield message
        replies = column(location, {"replies": [], **message}, "replies", list, "a list of messages")
        if not all(isinstance(reply, dict) for reply in replies):
            raise UserError(f"{location}: column 'replies' must be a list of messages, got {replies!r}: fix the row")
        waiting += [{**reply, "parent_id": message.get("message_id")} for reply in replies]


def _comparisons(root: TreeMessage) -> Iterator[tuple[str, Record]]:
    """The ranked answers to each message of a tree."""
    waiting = [(root, [root.message])]
    while waiting:
        message, path = waiting.pop(0)
        ranked = [(reply, reply.rank) for reply in message.answers() if reply.rank is not None]
        if len({rank for _, rank in ranked}) > 1:
            yield (
                message.location,
                RankedCompletions(path, [reply.message for reply, _ in ranked], [rank for _, rank in ranked]),
            )
        waiting += [(reply, [*path, reply.message]) for reply in message.kept_replies()]


def _conversations(root: TreeMessage) -> Iterator[tuple[str, Record]]:
    """The longest conversations of a tree in which each assistant turn is the best reply."""
    waiting = [(root, [root.message])]
    while waiting:
        message, path = waiting.pop(0)
        if message.message["role"] == "user":
            waiting += [(best, [*path, best.message]) for best in message.answers()[:1]]
            continue
        going_on = [reply for reply in message.kept_replies() if reply.answers()]
        if not going_on:
            yield root.location, {"messages": path}
        waiting += [(reply, [*path, reply.message]) for reply in going_on]
