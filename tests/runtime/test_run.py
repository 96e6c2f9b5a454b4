"""A run's folder, metrics and display."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.command_line import save_config
from hybrid_rlhf.runtime.files.checkpoint_folder import newest_complete, write_manifest
from hybrid_rlhf.runtime.files.durable import checksum
from hybrid_rlhf.runtime.files.folder_lock import LOCK_FILE
from hybrid_rlhf.runtime.files.names import CONFIG_FILE, LOG_FILE
from hybrid_rlhf.runtime.liveness.signals import SignalRequests, forward_signals
from hybrid_rlhf.runtime.run import DATA_FILE, _require_shared, start_run
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.clock import wait_until
from tests.support.errors import refused, user_error
from tests.support.ranks import run_apart, run_ranks
from tests.support.runs import sft_config
from tests.support.steps import checkpoint_names


def claim(folder: Path, resume: str = "never") -> Path | None:
    with start_run(sft_config(folder, resume)) as run:
        return run.checkpoint


def checkpoint(folder: Path, name: str, *, complete: bool = True) -> Path:
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "rows").write_bytes(b"0123456789")
    if complete:
        write_manifest(path, {"files": {"rows": {"bytes": 10, "crc32": checksum(path / "rows")}}, "figures": {}})
    return path


def test_a_folder_is_never_overwritten_silently(tmp_path: Path) -> None:
    assert claim(tmp_path / "new") is None
    used = tmp_path / "used"
    used.mkdir()
    (used / "config.yaml").write_text("seed: 1\n")
    with user_error("output_dir .* unfinished run: set resume to auto"):
        claim(used)
    assert claim(used, "auto") is None
    (tmp_path / "file").write_text("")
    with user_error("output_dir must be a writable folder"):
        claim(tmp_path / "file" / "x")


def finished(folder: Path) -> SFTConfig:
    folder.mkdir()
    (folder / "finished.json").write_text("{}")
    settings = sft_config(folder, "auto")
    save_config(replace(settings, resume="never"), folder / "config.yaml")
    return settings


def claim_finished(world: World, settings: SFTConfig) -> tuple[int | str | None, str]:
    del world
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            with start_run(settings):
                return "started", ""
        except SystemExit as ended:
            return ended.code, output.getvalue()


def test_resuming_a_finished_run_succeeds_on_every_rank(tmp_path: Path) -> None:
    settings = finished(tmp_path / "run")
    (first, said), second = run_ranks(claim_finished, 2, tmp_path / "ranks", settings)
    assert first == 0 and said.endswith(f" {tmp_path}/run contains a finished run: nothing to do\n")
    assert second == (0, "")


def test_a_finished_run_succeeds_only_with_the_same_settings(tmp_path: Path) -> None:
    settings = finished(tmp_path / "run")
    moved = replace(settings, data=replace(settings.data, cache_dir="elsewhere"))
    with pytest.raises(SystemExit) as ended, start_run(moved):
        pass
    assert ended.value.code == 0
    longer = replace(settings, train=replace(settings.train, max_steps=99))
    with user_error(r"finished run .*\(train.max_steps\): set another output_dir"):
        with start_run(longer):
            pass
    with user_error("finished run: set another output_dir"):
        claim(tmp_path / "run")


def test_auto_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    wanted = checkpoint(tmp_path, "step_9_update_1")
    for name in ("step_2", "step_9"):
        checkpoint(tmp_path, name)
    checkpoint(tmp_path, "step_10", complete=False)
    assert claim(tmp_path, "auto") == wanted
    assert checkpoint_names(tmp_path) == ["step_10.superseded_1", "step_2", "step_9", "step_9_update_1"]
    second = tmp_path / "checkpoints" / "step_2"
    assert claim(tmp_path, str(second)) == second, "newer checkpoints are renamed"
    assert checkpoint_names(tmp_path) == [
        "step_10.superseded_1",
        "step_2",
        "step_9.superseded_1",
        "step_9_update_1.superseded_1",
    ]
    assert claim(tmp_path / "other", str(second)) == second, "a new run from the checkpoint of another"
    (tmp_path / "other" / "config.yaml").write_text("seed: 1\n")
    with user_error("unfinished run"):
        claim(tmp_path / "other", str(second))
    with user_error("resume must be never, auto, .*, got .*step_10"):
        claim(tmp_path, str(tmp_path / "checkpoints" / "step_10"))


def manifest(path: Path, change: Callable[[str], str]) -> None:
    """Change the text of a checkpoint's manifest."""
    (path / "manifest.json").write_text(change((path / "manifest.json").read_text()))


BREAKS: dict[str, Callable[[Path], object]] = {
    "rows has 5 bytes instead of 10": lambda path: (path / "rows").write_bytes(b"01234"),
    "rows is corrupt (its checksum differs)": lambda path: (path / "rows").write_bytes(b"0123456780"),
    "rows cannot be read (No such file or directory)": lambda path: (path / "rows").unlink(),
    "manifest.json is corrupt (its checksum differs)": lambda path: manifest(
        path, lambda text: text.replace("10", "11")
    ),
    "manifest.json cannot be read (JSONDecodeError)": lambda path: manifest(path, lambda text: text[:40]),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json cannot be read (TypeError)": lambda path: manifest(path, lambda _: "[]"),
    "its format is 7, this version reads 1": lambda path: write_manifest(
        path, {"format": 7, "files": {}, "figures": {}}
    ),
}


@pytest.mark.parametrize("reason", BREAKS)
def test_a_broken_checkpoint_is_skipped_with_the_reason(reason: str, tmp_path: Path, log_lines: list[str]) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    older, newer = checkpoint(tmp_path, "step_1"), checkpoint(tmp_path, "step_2")
    BREAKS[reason](newer)
    assert newest_complete(tmp_path, solo_world(torch.device("cpu"))) == older
    (line,) = log_lines
    assert line.startswith(f"resume skips {newer}: {reason}")
    if (newer / "manifest.json").exists():
        with user_error(f"needs a complete checkpoint.*{re.escape(reason)}"):
            claim(tmp_path, str(newer))
    assert claim(tmp_path, "auto") == older
    (older / "rows").unlink()
    (tmp_path / "metrics.jsonl").touch()
    assert claim(tmp_path, "auto") is None
    assert "has no complete checkpoint: the run starts from the beginning" in (tmp_path / LOG_FILE).read_text()


def test_a_run_resumes_from_its_initial_checkpoint_until_it_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, folder, model = checkpoint(tmp_path / "a", "step_4"), tmp_path / "b", tmp_path / "model"
    (model / "actor").mkdir(parents=True)
    (model / "actor" / "config.json").write_text("{}")
    write_manifest(first, {"files": {}, "figures": {}, "config": {"resume": str(model)}})
    for resume in (str(first), "auto", "auto"):
        with start_run(sft_config(folder, resume)) as run:
            assert run.checkpoint == first and run.warm_start == model
            assert run.checkpoint_config.resume == str(model), "the config of its checkpoints"
            save_config(run.folder_config, folder / "config.yaml")
    own = checkpoint(folder, "step_6")
    assert claim(folder, "auto") == own
    (own / "rows").unlink()
    assert claim(folder, "auto") == first
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert claim(tmp_path / "c", str(first)) == first, "a rank died before config.yaml was written"
    (first / "manifest.json").unlink()
    with user_error("not complete .manifest.json is missing.*: restore it, or set another"):
        claim(folder, "auto")


def test_an_error_before_the_end_of_the_first_step_restores_the_config(tmp_path: Path) -> None:
    def start(resume: str = "never", *, steps: int | None = None, error: type[BaseException] = UserError) -> None:
        with pytest.raises(error, match="an error"), start_run(sft_config(tmp_path, resume)) as run:
            for name in ("config.yaml", "sinks.json"):
                (tmp_path / name).write_text("seed: 2\n")
            if steps is not None:
                run.open_metrics(None)
                for step in range(steps + 1):
                    run.log(step, {})
            raise error("an error")

    def is_unfinished() -> bool:
        return "unfinished run" in refused(claim, tmp_path)

    start()
    start(steps=0)
    assert "an error" in (tmp_path / LOG_FILE).read_text(), "the log of a run that has begun stays"
    assert not (tmp_path / "sinks.json").exists(), "the next start is another run of the trackers"
    start(steps=0, error=KeyboardInterrupt)
    start(steps=1)
    assert (tmp_path / "config.yaml").read_text() == "seed: 2\n" and is_unfinished()
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints").mkdir()
    start(steps=0)
    assert is_unfinished(), "a checkpoint within the first step"
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    start("auto")
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n", "the same when it resumes"


def fails_alone(world: World, folder: str) -> set[str]:
    """The files that are left when the second of two ranks ends in the first step, and the first with it."""
    error = RankError if world.rank else RuntimeError
    with pytest.raises(error, match="an error"), start_run(sft_config(Path(folder))) as run:
        if world.is_main:
            save_config(run.config, Path(folder) / CONFIG_FILE)
        run.open_metrics(None)
        world.barrier()
        raise error("an error")
    return {path.name for path in Path(folder).iterdir()}


def test_a_resume_of_an_empty_folder_says_that_it_starts(tmp_path: Path) -> None:
    """A misspelt output_dir started again without a word."""
    for resume, said in (("never", False), ("auto", True)):
        with start_run(sft_config(tmp_path / resume, resume)):
            log = (tmp_path / resume / LOG_FILE).read_text()
        assert ("has no complete checkpoint: the run starts from the beginning" in log) == said


def test_an_error_of_one_rank_in_the_first_step_restores_the_config(tmp_path: Path) -> None:
    """Without --resume auto the same command was refused, as the folder had an unfinished run."""
    _, left = run_ranks(fails_alone, 2, tmp_path / "ranks", str(tmp_path / "run"))
    assert left.isdisjoint({CONFIG_FILE, "metrics.jsonl"}) and LOG_FILE in left
    claim(tmp_path / "run")


def test_an_error_before_the_loop_leaves_the_files_of_the_folder_as_they_were(tmp_path: Path) -> None:
    def start(resume: str) -> None:
        with user_error("an error"), start_run(sft_config(tmp_path, resume)):
            assert (tmp_path / LOG_FILE).exists()
            (tmp_path / DATA_FILE).write_text("{}")
            raise UserError("an error")

    start("never")
    assert {path.name for path in tmp_path.iterdir()} <= {LOCK_FILE}
    (tmp_path / CONFIG_FILE).write_text("seed: 1\n")
    (tmp_path / DATA_FILE).write_text('{"rows": 1}')
    (tmp_path / LOG_FILE).write_text("an older line\n")
    start("auto")
    assert (tmp_path / DATA_FILE).read_text() == '{"rows": 1}'
    assert (tmp_path / LOG_FILE).read_text().startswith("an older line\n"), "the log of a run that resumes goes on"


def claims_elsewhere(world: World, folder: str) -> tuple[str, list[str]]:
    """Of two ranks on two hosts, each with a folder of its own."""
    own = Path(folder) / f"host{world.rank}"
    own.mkdir()
    return refused(_require_shared, own, replace(world, local_rank=0, local_size=1)), os.listdir(own)


@pytest.mark.slow
def test_a_folder_that_hosts_do_not_share_is_refused_by_every_rank(tmp_path: Path) -> None:
    """tests/hosts has it with real hosts, where only root can run it."""
    for text, left in run_ranks(claims_elsewhere, 2, tmp_path / "ranks", str(tmp_path)):
        assert "/host1 on " in text and "is another folder than that of rank 0: set output_dir to a shared one" in text
        assert left == []


def test_a_save_request_outside_the_loop_is_ignored(tmp_path: Path) -> None:
    with start_run(sft_config(tmp_path)):
        os.kill(os.getpid(), signal.SIGUSR1)
        with SignalRequests().catch():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_launcher_without_ranks_receives_no_save_request() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        with forward_signals(process) as requests:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert not requests.stop
        process.communicate("\n")
    assert process.returncode == 0


def test_signals_are_recorded() -> None:
    run_apart(record_signals)


def record_signals() -> None:
    requests = SignalRequests()
    with requests.catch():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.saves == 2 and not requests.stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.stop
        if not (child := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1


def test_a_background_job_ignores_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        requests = SignalRequests()
        with requests.catch():
            os.kill(os.getpid(), signal.SIGINT)
        assert not requests.stop
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("work", ["while True: pass", "hashlib.pbkdf2_hmac('sha1', b'', b'', 2**31 - 1)"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(number: int, work: str) -> None:
    """A second Ctrl-C was lost within a second of the first, and while no bytecode runs, as in products of torch."""
    program = f"""
import hashlib, os, signal
from hybrid_rlhf.runtime.liveness.signals import SignalRequests
signal.signal(signal.SIGINT, signal.default_int_handler)
with SignalRequests().catch():
    os.write(2, b"begun\\n")
    {work}
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None and process.stderr.readline() == "begun\n"
            process.send_signal(number)
            status = Path(f"/proc/{process.pid}/status")  # two that are pending at once would be one
            wait_until(lambda: re.search("ShdPnd:\t0*\n", status.read_text()) is not None, what="its delivery")
            process.send_signal(number)
            assert process.wait(timeout=60) == 128 + number
            said = "stopping after this step; a second Ctrl-C ends at once\n" * (number == signal.SIGINT)
            assert process.stderr.read() == said
        finally:
            process.kill()


def test_a_run_that_another_single_rank_starts_has_a_group_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook with an open session starts a step: the step tried to listen at the session's port."""
    with socket.socket() as parents:
        parents.bind(("127.0.0.1", 0))
        parents.listen()
        port = str(parents.getsockname()[1])
        inherited = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        inherited |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HYBRID_RLHF_SOLO": f"{os.getppid()}:{port}"}
        for name, value in inherited.items():
            monkeypatch.setenv(name, value)
        with start_run(sft_config(tmp_path)) as run:
            assert run.world.size == 1 and os.environ["MASTER_PORT"] != port


def test_a_closed_run_leaves_no_environment_to_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with start_run(sft_config(tmp_path)) as run:
        assert run.world.size == 1 and os.environ["RANK"] == "0"
    assert dict(os.environ) == before
