"""Commands that wait for the training engine: in order within a model, fairly among tenants, packed together.

A command runs when all earlier ones of its model have ended, in the order of their `seq_id`, whatever the order in
which they arrive. Forward and backward passes that wait together are packed into one micro-batch, row by row by fair
queueing among tenants, so a long batch of one tenant delays another's by at most one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.training.futures import Answer, CommandFailed, Future
from hybrid_rlhf.serving.training.store import Run
from hybrid_rlhf.serving.training.tenants import FairShare, Tenant

_MOST_ROWS = 128
"""Rows of a packed batch: short ones take longer than their tokens."""
BACKWARD = "forward_backward"
"""Name of the commands that add to a gradient."""


@dataclass(frozen=True)
class PackedRow:
    """A row of a packed batch."""

    row: Any
    """Row of the engine."""
    tokens: int
    loss: Any = None
    """Its loss, also of a forward pass alone."""


Work = Callable[["Model", int], Answer] | Sequence[PackedRow]
"""What a command does on the engine's thread, with its model and its seq_id, or the rows that are computed for it."""


@dataclass(eq=False)
class Command:
    """One command of a model."""

    model: Model
    name: str
    """Its name in the API."""
    future: Future
    run: Callable[[Model, int], Answer] | None = None
    """See Work; None: its rows are computed."""
    rows: Sequence[PackedRow] = ()
    taken: int = 0
    """Number of rows that were taken into a batch."""
    results: list[Any] = field(default_factory=list)
    """Results of the rows so far, in their order."""


@dataclass(eq=False)
class Model:
    """A model in training: its commands in order, and its state in the engine."""

    run: Run
    tenant: Tenant
    next_seq: int
    """seq_id of the command that runs, or is next."""
    waiting: dict[int, Command] = field(default_factory=dict)
    """Commands by seq_id; those after a gap wait until it is filled."""
    served_tokens: int = 0
    """Tokens of its rows that were taken."""
    ready: bool = False
    """True when its adapter is in the engine; it is put there before its next command."""
    has_gradient: bool = False
    broken: UserError | CommandFailed | None = None
    """Why a backward pass since the last step has failed: the step would use a part of the gradient."""
    saved: bool = True
    """True if its state is its run's saved one."""
    leaving: list[Future] = field(default_factory=list)
    """Requests that end when it has left the engine; not empty: it leaves after its commands."""

    @property
    def last_seq(self) -> int:
        """Largest seq_id so far."""
        return max(self.waiting, default=self.next_seq - 1)

    @property
    def head(self) -> Command | None:
        """The command that runs, or is next."""
        return self.waiting.get(self.next_seq)

    def end(self) -> None:
        """Advance to the command after the head."""
        del self.waiting[self.next_seq]
        self.next_seq += 1


TakenRow = tuple[Command, PackedRow]
"""A row in a batch, and the command that it belongs to."""


class CommandQueue:
    """The commands of all models. Used on the event loop only."""

    def __init__(self, batch_tokens: int, *, apart: bool = False) -> None:
        """Take the number of tokens of a micro-batch, in which a longer row is alone; `apart`: the rows of a command
        share none with those of others."""
        self._batch_tokens = batch_tokens
        self._apart = apart
        self._share = FairShare()
        self.models: dict[str, Model] = {}
        """Models that have a state, by id."""

    def models_of(self, tenant: Tenant) -> int:
        """Number of models of a tenant that are in the engine."""
        return sum(model.ready for model in self.models.values() if model.tenant is tenant)

    def heads(self, *, ready: bool) -> list[Command]:
        """The next command of each model that has one and is in the engine, or is not."""
        heads = [model.head for model in self.models.values() if model.ready == ready]
        return [head for head in heads if head is not None]

    def next_runs(self) -> list[Command]:
        """The commands without rows that can run now, at most one of each model."""
        return [head for head in self.heads(ready=True) if head.run is not None]

    def next_rows(self) -> list[TakenRow]:
        """Rows of the next packed batch, by fair queueing among tenants; empty if none can run."""
        waiting = [head for head in self.heads(ready=True) if head.rows]
        rows: list[TakenRow] = []
        used = 0
        while ready := sorted(
            (head for head in waiting if head.taken < len(head.rows)), key=lambda head: head.model.served_tokens
        ):
            self._share.update(head.model.tenant for head in ready)
            command = self._share.next(ready, lambda head: head.model.tenant)
            if self._apart:
                waiting = [command]
            row = command.rows[command.taken]
            if rows and used + row.tokens > self._batch_tokens or len(rows) == _MOST_ROWS:
                break
            command.taken += 1
            used += row.tokens
            command.model.served_tokens += row.tokens
            self._share.charge(command.model.tenant, row.tokens)
            rows.append((command, row))
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
