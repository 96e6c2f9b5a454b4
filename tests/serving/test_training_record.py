"""What a training server writes for the board: the load and throughput of each tenant, and no secrets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_rlhf.board.runs.folders import RunFolders
from hybrid_rlhf.board.runs.summary import RunSummaries
from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.runtime.files.names import CONFIG_FILE, METRICS_FILE
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.serving.training.record import ServiceRecord, write_settings
from tests.support.clock import ManualClock
from tests.support.documents import undocumented_metrics
from tests.support.training_server import BASE, BOB, SEQUENCE, Client, training_server

TRAINED = len(SEQUENCE) - 1


def test_the_board_has_the_tenants_the_queue_and_the_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of each tenant are those of its own requests; a server that does nothing adds no lines."""
    clock = ManualClock()

    def monotonic() -> float:
        clock.seconds += 1e-6
        return clock.seconds

    monkeypatch.setattr("hybrid_rlhf.serving.training.record.time", SimpleNamespace(monotonic=monotonic))
    with training_server(tmp_path) as (url, service):
        record = ServiceRecord(tmp_path, service.tenants, service.metrics)
        record.add_line()
        assert read_metrics(tmp_path) == [], "nothing has happened"
        alice = Client(url)
        bob = Client(url, BOB)
        model = alice.model()
        alice.train(model, 1, 3, rows=[SEQUENCE, SEQUENCE])
        clock.seconds += 10
        record.add_line()
        tokens = len(bob.greedy(SEQUENCE[0], base_model=BASE))
        clock.seconds += 4
        record.add_line()
        record.add_line()
        first, second = read_metrics(tmp_path)
        again = ServiceRecord(tmp_path, service.tenants, service.metrics)
        alice.train(model, 7, 1)
        clock.seconds += 1
        again.add_line()
        third = read_metrics(tmp_path)[-1]
        waiting = alice.forward_backward(model, 10, [SEQUENCE] * 4)  # the command before it is missing
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(again.follow(60.0), 0.05))  # ended in its first interval
        for request in (alice.forward_backward(model, 9), waiting):
            alice.result(request)
        fourth = read_metrics(tmp_path)[-1]
    assert first["tenants/alice/trained_tokens_per_second"] == pytest.approx(3 * 2 * TRAINED / 10)
    assert first["tenants/alice/requests_per_second"] == pytest.approx((1 + 6) / 10)
    assert first["tenants/alice/models"] == 1
    assert first["tenants/bob/trained_tokens_per_second"] == 0
    assert first["perf/trained_tokens_per_second"] == first["tenants/alice/trained_tokens_per_second"]
    assert second["tenants/alice/trained_tokens_per_second"] == 0 == second["queue/waiting_tokens"]
    assert second["tenants/bob/sampled_tokens_per_second"] == pytest.approx(tokens / 4)
    assert [first["step"], second["step"], third["step"]] == [1, 2, 3], "it continues after a restart"
    assert third["time_seconds"] >= second["time_seconds"]
    assert third["tenants/alice/trained_tokens_per_second"] > 0
    for kind, count in (("waiting_tokens", 4 * TRAINED), ("requests_in_flight", 1)):
        assert fourth[f"tenants/alice/{kind}"] == fourth[f"queue/{kind}"] == count
        assert fourth[f"tenants/bob/{kind}"] == 0
    assert undocumented_metrics(first) == set()


def test_the_board_lists_a_server_without_its_keys(tmp_path: Path) -> None:
    """As a folder that it cannot start: it is none of a run."""
    secret = "tml-a-secret-key"
    config = TrainServerConfig(path="models/base", api_keys={"alice": "${ALICE}", "bob": secret})
    write_settings(replace(config, output_dir=str(tmp_path)), tmp_path)
    text = (tmp_path / CONFIG_FILE).read_text()
    assert secret not in text and "${ALICE}" in text and "${KEY_OF_bob}" in text
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "time_seconds": 10.0}\n')
    (run,) = RunFolders([tmp_path]).all()
    shown = RunSummaries().summary(run)
    keys = ("state", "problem", "command", "algorithm", "model")
    assert [shown[key] for key in keys] == ["stopped", None, None, "train-server", "models/base"]
