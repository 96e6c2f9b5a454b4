"""Which commands run next, and whose: without a server."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

from hybrid_rlhf.serving.training.futures import Future, Futures, Gone
from hybrid_rlhf.serving.training.queue import Command, CommandQueue, Model, PackedRow, TakenRow
from hybrid_rlhf.serving.training.store import Run
from hybrid_rlhf.serving.training.tenants import QuotaExceeded, Quotas, Tenant, Tenants

QUOTAS = Quotas(requests=3, queued_bytes=100, models=2)


def tenant(name: str) -> Tenant:
    return Tenant(name, QUOTAS)


def send(model: Model, seq: int, rows: list[int]) -> None:
    """Add a command with rows of these numbers of tokens."""
    future = Future("id", model.tenant, 0, 0)
    packed = [PackedRow(None, tokens) for tokens in rows]
    model.waiting[seq] = Command(model, "forward_backward", future, rows=packed)


def model(queue: CommandQueue, owner: Tenant, name: str, rows: list[int] | None = None) -> Model:
    """A model in the engine, with a command of these rows."""
    found = queue.models[name] = Model(Run(name, owner.name, "session"), owner, next_seq=1, ready=True)
    if rows:
        send(found, 1, rows)
    return found


def tokens_by_tenant(rows: list[TakenRow]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for command, row in rows:
        counts[command.model.tenant.name] += row.tokens
    return counts


def test_short_rows_are_computed_in_batches_of_a_number() -> None:
    """Thousands of rows of one token took as long as thousands of rows do, and others waited for them."""
    queue = CommandQueue(batch_tokens=8192)
    model(queue, tenant("alice"), "a", [1] * 300)
    assert [len(queue.next_rows()) for _ in range(4)] == [128, 128, 44, 0]


def test_tenants_share_equally_from_now_on_whatever_they_had_before() -> None:
    """From the next batch on, whatever one has queued. Neither is one ahead for having been idle, nor behind for having
    been alone, nor for having several models."""
    queue = CommandQueue(batch_tokens=60)
    alice, bob, carol = map(tenant, ("alice", "bob", "carol"))
    model(queue, alice, "a", [10] * 600)
    for _ in range(20):
        assert tokens_by_tenant(queue.next_rows()) == {"alice": 60}
    for number in range(5):
        model(queue, bob, f"b{number}", [5] * 600)
    model(queue, carol, "c", [20] * 600)
    counts = tokens_by_tenant([row for _ in range(30) for row in queue.next_rows()])
    assert max(counts.values()) - min(counts.values()) <= 20, counts
    assert {entry.served_tokens for entry in queue.models.values() if entry.tenant is bob} <= {115, 120, 125}


def test_one_that_leaves_and_comes_back_waits_no_longer_for_it() -> None:
    """A client sends its next command when it has the last result: its queue is empty in between."""
    queue = CommandQueue(batch_tokens=40)
    alice, bob = map(tenant, ("alice", "bob"))
    model(queue, alice, "a", [10] * 10_000)
    short = model(queue, bob, "b")
    batches = 0
    for seq in range(1, 101):
        send(short, seq, [10, 10])
        while (head := short.head) is not None and head.taken < 2:
            queue.next_rows()
            batches += 1
        short.end()
        queue.next_rows()  # without bob
    assert batches == 100


def test_commands_run_in_order_and_those_after_a_gap_wait() -> None:
    queue = CommandQueue(batch_tokens=100)
    alice = tenant("alice")
    queue_of_model = model(queue, alice, "a")
    step = Command(queue_of_model, "optim_step", Future("id", alice, 0, 0), run=dict)
    queue_of_model.waiting[3] = step
    send(queue_of_model, 2, [10])
    assert not queue.next_runs() and not queue.next_rows()
    send(queue_of_model, 1, [10, 120])
    assert [row.tokens for _, row in queue.next_rows()] == [10]
    assert [row.tokens for _, row in queue.next_rows()] == [120], "a row that is longer than a batch is one of its own"
    assert not queue.next_rows(), "the second command waits until the first has ended"
    queue_of_model.end()
    assert len(queue.next_rows()) == 1
    assert not queue.next_runs()
    queue_of_model.end()
    assert queue.next_runs() == [step]
    assert queue.waiting_tokens(alice) == 0


def test_quotas_count_what_is_in_flight() -> None:
    futures = Futures()
    alice = tenant("alice")
    first, is_new = futures.open("1", alice, b"x" * 10, more_bytes=50)  # a row takes more than its bytes
    assert is_new
    assert futures.open("1", alice, b"x" * 10) == (first, False), "sent again: the same, and counted once"
    with pytest.raises(QuotaExceeded, match="key alice has 1 requests of 60 bytes in flight, at most 3 of 100 bytes"):
        futures.open("2", alice, b"x" * 41)
    futures.open("3", alice, b"x" * 20)
    futures.open("4", alice, b"")
    with pytest.raises(QuotaExceeded, match="3 requests of 80 bytes"):
        futures.open("5", alice, b"")
    first.cancel = lambda: None
    first.finish({"type": "done"})
    assert first.cancel is None, "a result that is kept does not keep the work"
    first.fail("too late", by_user=True)
    assert first.answer == {"type": "done"}
    assert (alice.requests, alice.queued_bytes) == (2, 20)
    futures.open("5", alice, b"x" * 90, is_awaited=True)  # what is in flight waits for it
    futures.open("6", tenant("bob"), b"x" * 200)  # one that is larger than the quota goes alone
    with pytest.raises(Gone):
        futures.find("6", alice)


def test_results_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    futures = Futures()
    alice = tenant("alice")
    done, _ = futures.open("done", alice, b"")
    futures.open("runs", alice, b"")
    done.finish({})
    later = time.monotonic() + 1000
    monkeypatch.setattr("hybrid_rlhf.serving.training.futures.time", Mock(**{"monotonic.return_value": later}))
    futures.open("new", alice, b"")
    with pytest.raises(Gone):
        futures.find("done", alice)
    assert futures.find("runs", alice).answer is None


def test_a_key_keeps_a_number_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests without end filled the memory for as long as results are kept."""
    monkeypatch.setattr("hybrid_rlhf.serving.training.futures._KEPT_RESULTS", 8)
    futures = Futures()
    alice, bob = map(tenant, ("alice", "bob"))
    waits, _ = futures.open("waits", alice, b"")
    other, _ = futures.open("other", bob, b"")
    other.finish({})
    for number in range(100):
        futures.open(str(number), alice, b"")[0].finish({})
    assert futures.find("99", alice).answer == {} and futures.find("waits", alice) is waits
    assert futures.find("other", bob) is other
    with pytest.raises(Gone):
        futures.find("80", alice)


def test_keys_name_their_tenants() -> None:
    keys = Tenants({"alice": "tml-a", "bob": "tml-b"}, QUOTAS)
    tenants: Any = [keys.of_key(key) for key in ("tml-a", "tml-b", "tml-c", "", "tml-ä")]
    assert [None if entry is None else entry.name for entry in tenants] == ["alice", "bob", None, None, None]
    assert Tenants({}, QUOTAS).of_key("x") is None
    local = Tenants({}, QUOTAS).of_key("tml-x")
    assert local is not None and local.name == "local"
