"""Token records: what is written is read back row by row, a failing disk ends nothing, and no reader needs torch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hybrid_rlhf.runtime.observability.token_log import TokenLog
from hybrid_rlhf.runtime.observability.token_records import TokenRecords, record_file
from tests.support.faults import files_of_at_most
from tests.support.runs import run_python

ARRAYS = {
    "offsets": np.array([0, 4, 6, 9]),
    "response_offsets": np.array([0, 2, 2, 4]),
    "prompt_lengths": np.array([2, 2, 1]),
    "ids": np.arange(10, 19, dtype=np.int32),
    "response": np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=bool),
    "columns.old_logprobs": np.array([-1.5, -2.0, math.nan, -0.25], dtype=np.float32),
    "columns.ref_logprobs": np.array([-1.0, -2.5, -1.0, -math.inf], dtype=np.float32),
    "columns.weight_versions": np.array([3, 3, 3, 4], dtype=np.int32),
}


def log_of(folder: Path, *, enabled: bool = True) -> TokenLog:
    return TokenLog(folder, ranks=2, enabled=enabled)


def test_a_row_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.delenv("HYBRID_RLHF_PRODUCTS", raising=False)
    log_of(tmp_path).write(7, lambda: ARRAYS)
    records = TokenRecords(tmp_path)
    assert records.steps() == [7] and records.details(7) == {"ranks": 2, "environment": {"OMP_NUM_THREADS": "3"}}
    first, empty, last = (records.read(7, index) for index in range(3))
    assert (first.prompt_length, first.ids, first.response) == (2, [10, 11, 12, 13], [False, False, True, True])
    assert first.columns == {
        "old_logprobs": [None, None, -1.5, -2.0],
        "ref_logprobs": [None, None, -1.0, -2.5],
        "weight_versions": [None, None, 3, 3],
        "kl": [None, None, -0.5, 0.5],
    }
    assert (empty.ids, empty.response) == ([14, 15], [False, False])
    assert set(empty.columns) == set(first.columns) and set(empty.columns["kl"]) == {None}
    assert last.columns["old_logprobs"] == [None, None, -0.25] and last.columns["kl"] == [None, None, None]


@pytest.mark.parametrize(
    ("step", "index", "error"), [(7, 3, IndexError), (7, -1, IndexError), (8, 0, FileNotFoundError)]
)
def test_what_is_not_there_is_an_error(step: int, index: int, error: type[Exception], tmp_path: Path) -> None:
    log_of(tmp_path).write(7, lambda: ARRAYS)
    with pytest.raises(error):
        TokenRecords(tmp_path).read(step, index)


@pytest.mark.parametrize("content", [b"", b"{}"])
def test_a_damaged_record_is_named(content: bytes, tmp_path: Path) -> None:
    log_of(tmp_path).write(7, lambda: ARRAYS)
    file = record_file(tmp_path / "tokens", 7)
    for damaged in (content, file.read_bytes()[:-1]):
        file.write_bytes(damaged)
        for read in (lambda: TokenRecords(tmp_path).read(7, 0), lambda: TokenRecords(tmp_path).details(7)):
            with pytest.raises(ValueError, match="step_00000007.safetensors is not a token record"):
                read()


def test_a_resumed_run_drops_later_records_and_nothing_else(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    for step in (1, 2, 3):
        log.write(step, lambda: ARRAYS)
    mine = tmp_path / "tokens" / "step_00000003.safetensors.mine"
    mine.touch()
    other = log_of(tmp_path, enabled=False)
    other.resume(0)
    other.write(4, lambda: pytest.fail("called on a rank that does not write"))
    assert TokenRecords(tmp_path).steps() == [1, 2, 3], "only the main rank changes them"
    log.resume(1)
    assert TokenRecords(tmp_path).steps() == [1] and mine.exists()
    log_of(tmp_path / "new").resume(0)


def test_a_full_disk_costs_the_record_alone(tmp_path: Path, log_lines: list[str]) -> None:
    log = log_of(tmp_path)
    with files_of_at_most(100):
        for step in (1, 2):
            log.write(step, lambda: ARRAYS)
    log.write(3, lambda: ARRAYS)
    assert TokenRecords(tmp_path).steps() == [3] and len(list((tmp_path / "tokens").iterdir())) == 1
    (line,) = log_lines
    assert "tokens cannot be written (File too large)" in line


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    log_of(tmp_path).write(7, lambda: ARRAYS)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from hybrid_rlhf.runtime.observability.token_records import TokenRecords\n"
        f"assert TokenRecords(Path({str(tmp_path)!r})).read(7, 0).prompt_length == 2\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    done = run_python(["-c", code])
    assert done.returncode == 0, done.stderr
