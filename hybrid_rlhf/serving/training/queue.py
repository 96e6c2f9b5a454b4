"""Commands that wait for the training engine: in order within a model, in turn among tenants, packed together.

A command runs when all earlier ones of its model have ended, in the order of their `seq_id`, whatever the order in
which they arrive. Forward and backward passes that wait together go into one packed micro-batch, row by row in turn
among the tenants, so that a long batch of one delays another's by one micro-batch at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.serving.training.futures import Answer, Future
from hybrid_rlhf.serving.training.tenants import FairShare, Tenant


@dataclass(frozen=True)
class PackedRow:
    """A row of a packed batch."""

    row: Any
    """Row of the engine."""
    tokens: int
    loss: Any = None
    """Its loss, also of a forward pass alone."""
    learns: bool = True
    """True if its gradient is computed."""


@dataclass(eq=False)
class Command:
    """One command of a model."""

    name: str
    """Its name in the API."""
    future: Future
    run: Callable[[], Answer] | None = None
    """Does it, on the engine's thread; None: its rows are computed."""
    rows: Sequence[PackedRow] = ()
    taken: int = 0
    """Number of rows that were taken into a batch."""
    results: list[Any] = field(default_factory=list)
    """Results of the rows so far, in their order."""


@dataclass(eq=False)
class ModelQueue:
    """The commands of one model."""

    model_id: str
    tenant: Tenant
    next_seq: int
    waiting: dict[int, Command] = field(default_factory=dict)
    """Commands by seq_id; those after a gap wait until it is filled."""
    last_seq: int = 0
    """Largest seq_id so far."""
    served_tokens: int = 0
    """Tokens of its rows that were taken."""

    def __post_init__(self) -> None:
        self.last_seq = self.next_seq - 1

    def add(self, seq: int, command: Command) -> None:
        """Add a command."""
        self.waiting[seq] = command
        self.last_seq = max(self.last_seq, seq)

    @property
    def head(self) -> Command | None:
        """The command that runs, or is next."""
        return self.waiting.get(self.next_seq)

    def end(self) -> None:
        """Go on to the command after the head."""
        del self.waiting[self.next_seq]
        self.next_seq += 1


@dataclass(frozen=True)
class TakenRow:
    """A row in a batch, and the command that it belongs to."""

    queue: ModelQueue
    command: Command
    row: PackedRow


class CommandQueue:
    """The commands of all models. Used on the event loop only."""

    def __init__(self, batch_tokens: int) -> None:
        """Take the number of tokens of a micro-batch; a longer row is one of its own."""
        self._batch_tokens = batch_tokens
        self._share = FairShare()
        self.models: dict[str, ModelQueue] = {}
        """Queues by the id of the model."""

    def next_runs(self) -> list[tuple[ModelQueue, Command]]:
        """The commands without rows that can run now, at most one of each model."""
        heads = ((model, model.head) for model in self.models.values())
        return [(model, head) for model, head in heads if head is not None and head.run is not None]

    def next_rows(self) -> list[TakenRow]:
        """Rows of the next packed batch, in turn among the tenants; empty if none can run."""
        rows: list[TakenRow] = []
        used = 0
        while ready := sorted(self._with_rows(), key=lambda entry: entry[0].served_tokens):
            self._share.update(model.tenant for model, _ in ready)
            model, command = self._share.next(ready, lambda entry: entry[0].tenant)
            row = command.rows[command.taken]
            if rows and used + row.tokens > self._batch_tokens:
                break
            command.taken += 1
            used += row.tokens
            model.served_tokens += row.tokens
            self._share.charge(model.tenant, row.tokens)
            rows.append(TakenRow(model, command, row))
        if not rows:
            self._share.update(())
        return rows

    def waiting_tokens(self, tenant: Tenant) -> int:
        """Number of tokens of a tenant's rows that were not taken yet."""
        return sum(
            row.tokens
            for model in self.models.values()
            if model.tenant is tenant
            for command in model.waiting.values()
            for row in command.rows[command.taken :]
        )

    def _with_rows(self) -> Iterator[tuple[ModelQueue, Command]]:
        """The models whose next command has rows that were not taken."""
        for model in self.models.values():
            head = model.head
            if head is not None and head.taken < len(head.rows):
                yield model, head
