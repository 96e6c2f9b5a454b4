"""Each sink has the metrics of a run, and a resumed run continues it; against the real libraries, without a network."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.sections.run import SinkName
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.background import BackgroundQueue
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.observability.metrics import SINKS, MetricsWriter
from hybrid_rlhf.runtime.observability.sinks.sink import (
    EndState,
    MetricsSink,
    SinkThread,
    TrackedRun,
    read_ids,
    require_installed,
)
from hybrid_rlhf.runtime.run import start_run
from tests.support.clock import wait_until
from tests.support.errors import refused, user_error

PARAMS = {"seed": 42, "optimizer.lr": 1e-5, "data.sources": ["rows.jsonl"], "lora": None}


def write_twice(folder: Path, sink: SinkName, end_state: EndState = "finished") -> str | None:
    """Steps 0 to 3, then the run again from a checkpoint after step 2; the id of the run, which stays."""
    tracked = TrackedRun(folder, "project", "folder-run", PARAMS)
    writer = MetricsWriter(folder, sinks=[sink], tracked=tracked, resumed_step=-1)
    for step in range(4):
        writer.write(step, {"sft/loss": 1.0 / (step + 1), **({"eval/loss": 2.0} if step == 3 else {})})
    writer.close("stopped")
    first = read_ids(folder).get(sink)
    writer = MetricsWriter(folder, sinks=[sink], tracked=tracked, resumed_step=2)
    for step in (3, 4):
        writer.write(step, {"sft/loss": 9.0, "grad_norm": math.nan if step == 4 else 0.5})
    writer.close(end_state)
    assert read_ids(folder).get(sink) == first
    return first


def needs(name: str) -> None:
    """Skip without a package of a sink."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; the extras wandb, mlflow and trackio have it")


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format, after a header of 7 bytes."""
    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (rest := 2**15 - place % 2**15) < 7:
            place += rest
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


def test_the_table_has_a_column_per_metric_and_no_step_twice(tmp_path: Path, log_lines: list[str]) -> None:
    write_twice(tmp_path, "csv")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert list(rows[0]) == ["step", "sft/loss", "eval/loss", "grad_norm"]
    assert [row["sft/loss"] for row in rows] == ["1.0", "0.5", str(1 / 3), "9.0", "9.0"]
    assert [row["grad_norm"] for row in rows] == ["", "", "", "0.5", "nan"]
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5,1.0")
    writer = MetricsWriter(tmp_path, sinks=["csv"], resumed_step=9)
    writer.write(5, {"sft/loss": 7.0})
    writer.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines()[-1] == "5,7.0,,", "a line that a crash cut is replaced"
    assert not log_lines


def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = write_twice(tmp_path, "wandb")
    assert run_id and not log_lines
    wait_until(lambda: len(wandb_history(tmp_path, run_id)) == 6)  # W&B's own process writes the files
    recorded = wandb_history(tmp_path, run_id)
    assert [row["step"] for row in recorded] == [0, 1, 2, 3, 3, 4]
    assert [row["sft/loss"] for row in recorded] == [1.0, 0.5, 1 / 3, 0.25, 9.0, 9.0]


def wandb_history(folder: Path, run_id: str) -> list[dict[str, Any]]:
    """Rows of both parts of an offline run, whose settings are checked."""
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(run_id in file.name for file in files)
    for file in files:
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                assert record.run.project == "project" and record.run.display_name == "folder-run"
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in row.items() if not key.startswith("_")})
    assert config["seed"] == 42 and config["data.sources"] == ["rows.jsonl"]
    return rows


def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    needs("mlflow")
    needs("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (tmp_path / "run").mkdir()
    run_id = write_twice(tmp_path / "run", "mlflow", "failed")
    assert run_id and not log_lines
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FAILED" and run.info.run_name == "folder-run"
    assert client.get_experiment(run.info.experiment_id).name == "project"
    assert run.data.params["optimizer.lr"] == "1e-05" and run.data.params["data.sources"] == "['rows.jsonl']"
    found = sorted((point.step, point.value) for point in client.get_metric_history(run_id, "sft/loss"))
    assert found == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3)), (3, 0.25), (3, 9.0), (4, 9.0)]


def test_trackio_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_id = write_twice(tmp_path, "trackio")
    assert run_id and not log_lines
    import sqlite3

    (file,) = (tmp_path / "trackio").glob("project*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {row[0] for row in rows} == {run_id}
    assert [row[1] for row in rows] == [0, 1, 2, 3, 3, 4]
    assert [json.loads(row[2])["sft/loss"] for row in rows] == [1.0, 0.5, pytest.approx(1 / 3), 0.25, 9.0, 9.0]


def test_a_missing_package_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SINKS["trackio"], "module", "no_such_package")
    assert refused(require_installed, SINKS, ["csv", "trackio"]) == (
        "logging.sinks trackio needs the package no_such_package, which is not installed: "
        "pip install 'hybrid_rlhf[trackio]'"
    )
    config = parse_config(SFTConfig, ["--logging.sinks", "[csv, trackio]", "--output_dir", str(tmp_path / "run")])
    with user_error("logging.sinks trackio needs"), start_run(config):
        pass


class SlowSink(MetricsSink):
    """Waits for a server that does not answer."""

    module, title = "csv", "Slow"
    answer = threading.Event()

    def __init__(self, run: TrackedRun) -> None:
        self.answer.wait(60)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See MetricsSink."""

    def close(self, end_state: EndState) -> None:
        """See MetricsSink."""


def test_a_slow_sink_delays_no_step(tmp_path: Path, log_lines: list[str]) -> None:
    start = time.monotonic()
    sink = SinkThread(SlowSink, TrackedRun(tmp_path))
    for step in range(3):
        sink.write(step, {"loss": 1.0})
    sink.close("finished", within_seconds=0.2)
    assert time.monotonic() - start < 30, "the server answers after 60 seconds"
    SlowSink.answer.set()
    assert log_lines == ["Slow does not answer: it lacks the last 4 entries"]


def test_a_full_queue_discards_and_counts() -> None:
    begun, go, done = threading.Event(), threading.Event(), []

    def handle(item: int) -> None:
        begun.set()
        assert go.wait(60)
        done.append(item)

    queue = BackgroundQueue(handle, name="test", on_error=lambda error: None, limit=2)
    queue.put(0)
    assert begun.wait(60), "it is no longer in the queue"
    for item in range(1, 10):
        queue.put(item)
    go.set()
    assert queue.close(60) == 7 and done == [0, 1, 2]
