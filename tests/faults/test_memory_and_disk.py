"""Disks that are full, read-only or broken, and memory that is used up: one line, exit code 2, nothing half there."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.out_of_memory import explain_out_of_memory
from hybrid_rlhf.runtime.command_line import parse_config, user_errors
from hybrid_rlhf.runtime.files.disk import disk_errors_translated
from hybrid_rlhf.runtime.files.names import LOG_FILE
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.world import solo_world
from tests.support.faults import files_of_at_most, intercept, run_step
from tests.support.runs import sft_line
from tests.support.steps import MODULES, write_rows
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training_server import Client, error_of, training_server_process


def error_line(capsys: pytest.CaptureFixture[str], error: BaseException) -> str:
    """The one line that an entry point prints for an error."""
    with pytest.raises(SystemExit) as left, user_errors():
        raise error
    assert left.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


def test_other_errors_of_the_system_stay_what_they_are() -> None:
    for error in (OSError(errno.ECONNREFUSED, "refused"), PermissionError(errno.EACCES, "no socket"), OSError("odd")):
        with pytest.raises(OSError) as raised, user_errors():
            raise error
        assert raised.value is error


def test_a_fault_of_one_rank_is_told_by_that_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert error_line(capsys, RankError("no memory")) == "error: rank 3: no memory\n"
    full = error_line(capsys, OSError(errno.ENOSPC, "", "/x"))
    assert full == "error: rank 3: no space left on the device of /x: free some and resume\n"
    with pytest.raises(SystemExit), user_errors():
        raise UserError("every rank raises it, the first prints it")
    assert capsys.readouterr().err == ""


def test_a_fault_is_named_whatever_the_writer_calls_it(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(2**20)}
    writers: list[Callable[[], Any]] = [
        lambda: safetensors.save_file(weights, tmp_path / "x.safetensors"),
        lambda: torch.save(weights, tmp_path / "x.pt"),
        lambda: (tmp_path / "x.txt").write_text("x" * 2**20),
    ]
    for write in writers:
        with files_of_at_most(1000), pytest.raises(OSError) as caught, disk_errors_translated(tmp_path):
            write()
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path))
    for error in (ValueError("another fault"), UserError("a user error"), FileNotFoundError(errno.ENOENT, "no", "x")):
        with pytest.raises(type(error)) as same, disk_errors_translated(tmp_path):
            raise error
        assert same.value is error
    assert not list(tmp_path.glob(".probe*"))


def test_a_save_that_fails_leaves_the_model_that_was_there(tmp_path: Path) -> None:
    def save(lm: PreTrainedModel) -> None:
        tensors = ((name, parameter.detach().clone()) for name, parameter in lm.named_parameters())
        save_model(tmp_path, tensors, lm=lm, tokenizer=tiny_tokenizer(), world=solo_world(torch.device("cpu")))

    save(tiny_model())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for limit in (1000, max(map(len, before.values())) // 2):
        with files_of_at_most(limit), pytest.raises(Exception, match="os error 27|File too large"):
            save(tiny_model(seed=1))
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], capture_output=True).returncode:
        pytest.skip("only root mounts a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def line(tmp_path: Path, model_folder: Path) -> list[str]:
    """A short SFT run with its data in tmp_path."""
    line = sft_line(tmp_path / "run", model_folder, write_rows(tmp_path / "rows.jsonl"), "--train.max_steps 4")
    return line[1:]


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


def remove_data(folder: Path) -> None:
    shutil.rmtree(folder / "cache")
    (folder / "rows.jsonl").unlink()


@dataclass(frozen=True)
class Act:
    """Does something in the middle of the second update."""

    act: Callable[[Path], None]
    place: Path
    rank: int | None = None

    def arm(self) -> None:
        def around(call: int, run: Callable[[], Any], _: Sequence[Any]) -> Any:
            if call == 2:
                self.act(self.place)
            return run()

        intercept("hybrid_rlhf.supervised.trainer:SupervisedTrainer.step", around)


def in_a_process(line: list[str], place: Path, act: Callable[[Path], None] | None = None) -> tuple[int, str]:
    """Exit code and stderr of a run."""
    errors = place.parent / "stderr.txt"
    errors.unlink(missing_ok=True)
    (code,) = run_step(MODULES["sft"], 1, line, act and Act(act, place), errors=errors)
    return code, errors.read_text()


def test_a_disk_that_fills_up_in_mid_run(small_disk: Path, line: list[str]) -> None:
    """Its metrics wait in memory, its model does not fit; with room again the run goes on and ends."""
    output = small_disk / "run"
    line = [*line, "--output_dir", str(output)]
    code, stderr = in_a_process(line, small_disk, fill)
    assert code == 2 and f"error: no space left on the device of {output}" in stderr and "Traceback" not in stderr
    assert not [file.name for file in output.iterdir() if "model" in file.name or file.name == "finished.json"]
    assert [row["step"] for row in read_metrics(output)][:2] == [0, 1]
    (small_disk / "filler").unlink()
    code, stderr = in_a_process([*line, "--resume", "auto"], small_disk)
    assert code == 0 and AutoModelForCausalLM.from_pretrained(output) and (output / "finished.json").is_file()
    assert [row["step"] for row in read_metrics(output)] == [0, 1, 2, 3, 4]


@pytest.mark.faults
def test_a_full_disk_is_emptied_through_the_server(small_disk: Path, model_folder: Path) -> None:
    """Saving and sessions fail with the reason, training goes on, and a killed server starts and deletes."""
    folder = small_disk / "server"
    with training_server_process(str(model_folder), folder, "--model_name tiny") as (process, url):
        client = Client(url)
        model = client.model()
        client.train(model, 1, 1)
        client.save(model, 3, "a")
        fill(small_disk)
        assert "the disk of the server is full" in client.save(model, 4, "b")["error"]
        assert "the disk of the server is full" in error_of(client.request("create_session", {}), 400)
        client.train(model, 5, 1)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    with training_server_process(str(model_folder), folder, "--model_name tiny") as (process, url):
        client = Client(url)
        assert client.delete(f"training_runs/{model}/checkpoints/weights/a").status_code == 200
        assert client.session()
    assert not [file.name for file in folder.rglob("*partial*")]


def test_data_that_vanishes_in_mid_run_is_not_missed(tmp_path: Path, line: list[str]) -> None:
    """Rows are read in place from a cache that is open: removed, it is there until the run closes it."""
    place = tmp_path
    assert in_a_process([*line, "--output_dir", str(tmp_path / "whole")], place)[0] == 0
    cached = list((tmp_path / "cache").rglob("*.arrow"))
    assert cached and all(file.stat().st_mode & 0o222 == 0 for file in cached), "nor is it cut short by mistake"
    assert in_a_process([*line, "--output_dir", str(tmp_path / "removed")], place, remove_data)[0] == 0
    whole, removed = ([row.get("sft/loss") for row in read_metrics(tmp_path / name)] for name in ("whole", "removed"))
    assert whole == removed and len(whole) == 5 and not cached[0].exists()


def use_memory_up(place: Path) -> None:
    torch.empty(2**45)


def test_memory_that_is_used_up_in_mid_run_is_a_line(tmp_path: Path, line: list[str]) -> None:
    run = [*line, "--output_dir", str(tmp_path / "run")]
    code, said = in_a_process(run, tmp_path, use_memory_up)
    told = said.splitlines()[-1]
    assert code == 2 and "Traceback" not in said
    assert told.startswith("error: out of memory at step 2: 131072.0 GiB requested with ")
    assert "GiB of the host in use; resume auto continues with train.micro_batch_tokens 1024; " in told
    assert "; the plan estimates " in told and " MiB for SFT training; set " in told
    assert "train.micro_batch_tokens (now 2048) to " in told or "(now false) to true" in told
    assert in_a_process([*run, "--resume", "auto"], tmp_path)[0] == 0
    log = (tmp_path / "run" / LOG_FILE).read_text()
    assert "train.micro_batch_tokens 1,024: half of the size with which this run was out of" in log


GPU_WORDS = (
    "CUDA out of memory. Tried to allocate 3.25 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.1 GiB is"
)
PPO = parse_config(
    RLConfig,
    "--model.path MODEL --reward.components [MODEL] --rollout.prompts_per_step 64 --rollout.max_prompt_tokens 64"
    " --rollout.sampling.max_new_tokens 64 --train.micro_batch_size 8".split(),
)


@pytest.mark.parametrize(
    ("error", "phase", "expected"),
    [
        (
            torch.OutOfMemoryError(GPU_WORDS),
            "generation of step 3",
            "at generation of step 3: 3.2 GiB requested with .* GiB of the host in use; the plan estimates "
            ".* for generation; see hybrid-rlhf plan",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            "training of step 1",
            "for (actor|critic) training; set model.gradient_checkpointing .now false. to true or "
            "train.micro_batch_size",
        ),
    ],
)
def test_a_phase_is_told_with_its_estimate_and_what_makes_it_smaller(
    error: Exception, phase: str, expected: str, model_folder: Path
) -> None:
    path = str(model_folder)
    config = with_settings(PPO, {"model.path": path, "reward.components": [path]})
    assert re.search(expected, memory_message(error, phase, config))


def run_at(phase: str) -> Any:
    world = solo_world(torch.device("cpu"))
    return SimpleNamespace(world=world, watchdog=SimpleNamespace(phase=phase), micro_batch_tokens=None, folder=Path())


def memory_message(error: Exception, phase: str, config: RLConfig = PPO) -> str:
    with pytest.raises(RankError) as raised, explain_out_of_memory(config, run_at(phase)):
        raise error
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "out of memory at scoring: allocation failed with "),
        (RuntimeError("not enough memory: you tried to allocate 2097152 bytes."), "2.0 MiB requested with "),
        (RuntimeError("CUDA error: out of memory"), "allocation failed with "),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "allocation failed with "),
    ],
)
def test_want_of_memory_is_known_by_all_its_names_and_told_without_a_plan_too(error: Exception, expected: str) -> None:
    told = memory_message(error, "scoring")
    assert expected in told and "no memory plan (" in told and "MODEL" in told


def test_other_errors_are_no_want_of_memory(model_folder: Path) -> None:
    for error in (RuntimeError("shape mismatch"), ValueError("out of memory"), OSError(errno.EIO, "broken")):
        with pytest.raises(type(error)) as same, explain_out_of_memory(PPO, run_at("scoring")):
            raise error
        assert same.value is error
