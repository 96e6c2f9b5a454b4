"""`hybrid-rlhf train-server` in a process that is killed, and started again in its folder."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hybrid_rlhf.board.runs.folders import RunFolders
from hybrid_rlhf.board.runs.summary import RunSummaries
from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.runtime.files.folder_lock import FolderLock
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.serving.training.futures import Gone
from hybrid_rlhf.serving.training.server import serve_training
from hybrid_rlhf.serving.training.sessions import Sessions
from hybrid_rlhf.serving.training.store import Checkpoint, Records, Run, Store, UnknownObject, Usage
from hybrid_rlhf.serving.training.tenants import Quotas, Tenant
from tests.support.errors import refused, user_error
from tests.support.training_server import SEQUENCE, Client, error_of, training_server_process

KEY = "tml-any"


def test_a_killed_server_comes_back_with_all_that_was_saved(model_folder: Path, tmp_path: Path) -> None:
    """And with no more: an update that was not saved is never silently missing from what comes after. The board shows
    it all the while."""
    folder = tmp_path / "server"
    process_of = partial(training_server_process, str(model_folder), folder, "--model_name tiny")
    with process_of() as (process, url):
        client = Client(url, KEY)
        session = client.session()
        exact, lost, new, reference = (client.model(session, number) for number in range(4))
        client.train(exact, 1, 3)
        state = client.save(exact, 7, "state")["path"]
        saved = client.save(exact, 8, None)
        sampler = {"sampling_session_id": saved["sampling_session_id"]}
        tokens = client.greedy(SEQUENCE[0], **sampler)
        client.train(lost, 1, 1)
        client.save(lost, 3, "early")
        client.train(lost, 4, 2)
        wanted = client.train(reference, 1, 6)[3:]
        long = client.forward_backward(lost, 8, [list(range(3, 60))] * 500)  # seconds of work
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    half = folder / "runs" / exact / "weights" / ".half.partial"
    half.mkdir()

    with process_of() as (process, url):
        client = Client(url, KEY)
        assert not half.exists()
        unfinished = client.request("retrieve_future", {"request_id": long})
        assert "send the request again" in error_of(unfinished, 410)
        assert client.post("session_heartbeat", session_id=session)
        # saved by its last commands: goes on exactly, also if the answer of the last one was lost
        assert client.save(exact, 8, None) == saved
        assert client.greedy(SEQUENCE[0], 1, **sampler) == tokens
        losses = client.train(exact, 9, 3)
        assert losses == pytest.approx(wanted, rel=1e-6)
        # updates are lost: says so
        assert f"tinker://{lost}/weights/early" in error_of(client.send(lost, 8), 410)
        # never trained: is what it was
        first = client.train(new, 1, 1)
        assert first == client.train(client.model(session, 4), 1, 1)
        assert client.train(client.load(state, session, 5, optimizer=True)["model_id"], 1, 3) == losses
        assert client.post("create_model", session_id=session, model_seq_id=0, base_model="tiny")
        (shown,) = RunFolders([folder]).all()
        assert RunSummaries().summary(shown)["state"] == "running"
        listed = client.get("training_runs").json()["training_runs"]
        assert {exact, lost, new, reference} <= {run["training_run_id"] for run in listed}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert RunSummaries().summary(shown)["state"] == "stopped"
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["tenants/local/trained_tokens_per_second"] > 0


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert lock.acquire() is None
    config = TrainServerConfig(path="m", output_dir=str(tmp_path), port=0)
    with user_error("output_dir is for one server at a time, .* is in use by process"):
        serve_training(config, lambda _: pytest.fail("it loads nothing"), api_keys={}, report=print)
    lock.release()


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    """Whenever its writer fails or is killed."""
    store = Store(tmp_path)
    checkpoint = Checkpoint("run", "weights", "a", "alice", 4, 1, 1.0, 0)
    weights = tmp_path / "runs" / "run" / "weights"

    def whole(folder: Path) -> None:
        folder.mkdir()
        (folder / "all").write_text("all")

    def failing(folder: Path) -> None:
        whole(folder)
        raise OSError("no space left on device")

    def restarted(seq: int) -> Store:
        """The store of the next server, which has the checkpoint of a command and nothing else."""
        again = Store(tmp_path)
        found = again.find("tinker://run/weights/a", "alice")
        assert (found.seq, found.size_bytes) == (seq, 3) and [entry.name for entry in weights.iterdir()] == ["a"]
        return again

    store.write_checkpoint(checkpoint, whole, overwrite=False)
    with pytest.raises(OSError, match="no space"):
        store.write_checkpoint(replace(checkpoint, seq=2), failing, overwrite=True)
    restarted(1)
    # the old one steps aside, the new one gets its name, the old one is removed: killed before the second, the third
    (weights / "a").rename(weights / ".a.replaced.partial")
    (weights / ".a.partial").mkdir()
    restarted(1).write_checkpoint(replace(checkpoint, seq=2), whole, overwrite=True)
    (weights / ".a.replaced.partial").mkdir()
    again = restarted(2)
    again.write_checkpoint(replace(checkpoint, seq=2), whole, overwrite=False)  # an answer was lost: it comes again
    with user_error("a checkpoint never changes"):
        again.write_checkpoint(replace(checkpoint, seq=3), whole, overwrite=False)
    assert again.find("tinker://run/weights/a", "alice").seq == 2
    with user_error("a path is tinker://RUN/weights/NAME"):
        again.find("tinker://run/../weights/a", "alice")
    (weights / "a" / "checkpoint.json").write_text("{")
    with user_error("a server's folder has the files that it wrote, .*checkpoint.json was changed"):
        Store(tmp_path)


def test_a_session_ends_a_week_after_its_last_sign_of_life_also_through_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not because its server was away, and a finished one stays finished."""
    day = 24 * 3600.0
    alice = Tenant("alice", Quotas(requests=1, queued_bytes=1, models=1))
    sessions = Sessions(Records(tmp_path, Usage(math.inf)))
    old, seen, finished = (sessions.create(alice, {"n": 1}) for _ in range(3))
    sessions.finish(finished, alice)
    for session_id in (old, seen):
        os.utime(tmp_path / f"{session_id}.json", (time.time() - 8 * day,) * 2)
    clock = Mock(wraps=time)
    monkeypatch.setattr("hybrid_rlhf.serving.training.sessions.time", clock)

    def restarted(days: float) -> Sessions:
        clock.monotonic = lambda: time.monotonic() + days * day
        return Sessions(Records(tmp_path, Usage(math.inf)))

    sessions = restarted(0)
    assert sessions.forget([]) == [], "its client has an hour to come back"
    clock.monotonic = lambda: time.monotonic() + day / 20
    sessions.see(seen, alice)
    assert sessions.forget([old]) == [], "its models are in the engine"
    assert sessions.forget([]) == [old]
    with pytest.raises(UnknownObject):
        sessions.find(old, alice)
    sessions = restarted(0)
    with pytest.raises(Gone):
        sessions.find(finished, alice)
    assert sessions.find(seen, alice).metadata == {"n": 1}
    clock.monotonic = lambda: time.monotonic() + 6 * day
    assert sessions.forget([]) == [old]
    clock.monotonic = lambda: time.monotonic() + 8 * day
    assert {*sessions.forget([])} == {seen, finished}


def test_a_checkpoint_that_cannot_be_deleted_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was forgotten, and its folder stayed until the next start."""
    store = Store(tmp_path)
    checkpoint = Checkpoint("run", "weights", "a", "alice", 4, 1, expires=1.0)
    store.write_checkpoint(checkpoint, lambda folder: folder.mkdir(), overwrite=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", Mock(side_effect=OSError("busy")))
        store.expire()
    assert store.checkpoints() == [checkpoint]
    store.expire()
    assert store.checkpoints() == [] and not (tmp_path / "runs" / "run").exists()


def on_disk(folder: Path) -> int:
    """Bytes of runs and checkpoints with their folders, and of sessions and sampling sessions."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    folders = [*folder.glob("runs/*"), *folder.glob("runs/*/*/*/")]
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in files) + 4096 * len(folders)


def test_a_key_has_at_most_its_bytes_on_disk_whatever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata, sessions and the last checkpoint were in no quota. The number of all of them has one too."""
    most = 20 * 4096
    store = Store(tmp_path, most)

    def save(name: str, size: int, tenant: str = "a", *, overwrite: bool = False) -> None:
        def write(folder: Path) -> None:
            folder.mkdir()
            (folder / "weights").write_bytes(b"x" * size)

        store.write_checkpoint(Checkpoint("s:train:0", "weights", name, tenant, 4, 1), write, overwrite=overwrite)

    store.sessions.write("s", tenant="a", metadata={"x": "y" * 9000})
    store.sessions.write("s", tenant="a", metadata={"x": "y" * 9000}, finished=True)
    store.write_run(Run("s:train:0", "a", "s", metadata={"x": "y" * 5000}))
    store.write_sampler("s:sample:0", "a", None)
    save("first", 9000)
    save("first", 4000, overwrite=True)
    assert store.usage.bytes["a"] == on_disk(tmp_path) == 10 * 4096
    with user_error(r"may have 81920 bytes \(max_stored_gib\).*it would have 86016 bytes"):
        save("second", 9 * 4096)
    assert store.usage.bytes["a"] == on_disk(tmp_path), "nothing is left of it"

    def refuses_new_ones() -> None:
        for write in (
            lambda: store.sessions.write("t", tenant="a", metadata=None),
            lambda: store.write_sampler("s:sample:1", "a", None),
            lambda: store.write_run(Run("s:train:1", "a", "s")),
            lambda: save("third", 0),
        ):
            with user_error("max_stored_gib"):
                write()
        save("other", 4000, "b")

    with monkeypatch.context() as patch:
        patch.setattr("hybrid_rlhf.serving.training.store.MOST_RECORDS", 4)
        refuses_new_ones()
    save("second", 8 * 4096)
    refuses_new_ones()
    store.sessions.write("s", tenant="a", metadata=None, finished=True)  # what is there may be written again
    for again in (store, Store(tmp_path, most)):
        assert again.usage.bytes["a"] + again.usage.bytes["b"] == on_disk(tmp_path)
    store.delete(store.find("tinker://s:train:0/weights/second", "a"))
    store.end_session("s")
    assert store.usage.bytes["a"] + store.usage.bytes["b"] == on_disk(tmp_path)


def test_only_the_last_unnamed_weights_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(12):
        checkpoint = Checkpoint(
            "run", "sampler_weights", f"{number}", "a", 4, number, float(number), 0, unnamed=number != 3
        )
        checkpoint.sampler = f"session:sample:{number}"
        store.write_checkpoint(checkpoint, lambda folder: folder.mkdir(), overwrite=False)
        store.samplers.write(checkpoint.sampler, tenant="a", path=checkpoint.path)
    kept = [*range(3, 12)]
    assert sorted(int(entry.name) for entry in store.checkpoints()) == kept
    assert {*Store(tmp_path).samplers} == {f"session:sample:{number}" for number in kept}, "also on disk"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"host": "0.0.0.0"}, "a server that other machines reach needs api_keys, got host 0.0.0.0 without any"),
        ({"api_keys": {"a b": "x"}}, "api_keys are by names of letters, digits"),
        ({"adapters": {"../x": "y"}}, "adapters are by names of letters, digits"),
        ({"micro_batch_tokens": 100}, "micro_batch_tokens must be at least max_sequence_tokens 4096, got 100"),
    ],
)
def test_mistakes_in_settings_are_named(settings: dict[str, Any], error: str) -> None:
    with user_error(error):
        TrainServerConfig(path="m", **settings)


def test_keys_are_checked_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "tml-one-secret")
    monkeypatch.setenv("BAD", "sk-secret-secret")
    assert TrainServerConfig(path="m", api_keys={"a": "${ONE}"}).expanded_api_keys() == {"a": "tml-one-secret"}
    for keys in ({"a": "${BAD}"}, {"a": "tml-x"}, {"a": "${ONE}", "b": "${ONE}"}):
        assert "secret" not in refused(TrainServerConfig(path="m", api_keys=keys).expanded_api_keys)
