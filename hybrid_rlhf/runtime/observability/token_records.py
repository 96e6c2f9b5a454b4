"""Reads the records of each token of a run's rollouts, without torch: `tokens/step_00000010.safetensors`.

The arrays are flat, without padding. Row `n` of a rollout has the ids `offsets[n]` to `offsets[n + 1]`, first its
prompt, and the entries `response_offsets[n]` to `response_offsets[n + 1]` of each column, one per response token. A
reader loads only the entries of its row. `token_log.py` writes the files.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

TOKENS = "tokens"
COLUMN = "columns."
"""Prefix of the names of columns."""
DETAILS = "details"
"""The only key of the metadata, because the order of several keys is arbitrary."""
ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HYBRID_RLHF_PRODUCTS")
"""Variables that determine in which order numbers are summed."""
_FILE = re.compile(r"step_(\d+)\.safetensors")


@dataclass(frozen=True)
class TokenRecord:
    """One completion with its prompt, token by token."""

    prompt_length: int
    """Number of tokens before the completion."""
    ids: list[int]
    """Tokens of the prompt and the completion."""
    response: list[bool]
    """True where the actor sampled the token, for each of `ids`."""
    columns: dict[str, list[float | None]]
    """Values by column name, for each of `ids`; None where the token is not sampled or the value is not finite."""

    @classmethod
    def of(cls, arrays: Mapping[str, Any], index: int) -> TokenRecord:
        """Row `index` of a rollout's arrays, which may be slices of a file.

        Raises:
            IndexError: if there is no such row.
        """
        offsets = arrays["offsets"][:]
        if not 0 <= index < len(offsets) - 1:
            raise IndexError(f"row {index} of {len(offsets) - 1}")
        tokens = slice(*offsets[index : index + 2].tolist())
        entries = slice(*arrays["response_offsets"][index : index + 2].tolist())
        response = arrays["response"][tokens]
        columns = {
            name.removeprefix(COLUMN): arrays[name][entries] if entries.stop > entries.start else np.empty(0)
            for name in arrays
            if name.startswith(COLUMN)
        }
        if "ref_logprobs" in columns and "old_logprobs" in columns:
            columns["kl"] = columns["old_logprobs"] - columns["ref_logprobs"]
        return cls(
            int(arrays["prompt_lengths"][index : index + 1][0]),
            arrays["ids"][tokens].tolist(),
            response.tolist(),
            {name: _spread(values, response) for name, values in columns.items()},
        )


class TokenRecords:
    """The token records of a run folder, complete ones only."""

    def __init__(self, folder: Path) -> None:
        """Take the run folder, which may have none."""
        self._folder = folder / TOKENS

    def steps(self) -> list[int]:
        """The recorded steps, ascending."""
        return sorted(record_files(self._folder))

    def has(self, step: int) -> bool:
        """Return True if a step is recorded."""
        return record_file(self._folder, step).is_file()

    def read(self, step: int, index: int) -> TokenRecord:
        """One row of a step's rollout.

        Args:
            step: one of `steps`.
            index: index of the row in the rollout, as in samples.jsonl.

        Raises:
            FileNotFoundError: if the step is not recorded.
            IndexError: if it has no such row.
            ValueError: if its file is damaged.
        """
        with self._opened(step) as file:
            return TokenRecord.of({name: file.get_slice(name) for name in file.keys()}, index)  # noqa: SIM118

    def details(self, step: int) -> dict[str, Any]:
        """How a step was computed: `ranks` is the number of ranks, `environment` the variables of ENVIRONMENT that were
        set.

        It raises the same errors as `read`.
        """
        with self._opened(step) as file:
            details: dict[str, Any] = json.loads((file.metadata() or {})[DETAILS])
            return details

    @contextlib.contextmanager
    def _opened(self, step: int) -> Iterator[Any]:
        path = record_file(self._folder, step)
        try:
            with safe_open(path, framework="numpy") as file:
                yield file
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a token record ({error})") from error


def record_file(folder: Path, step: int) -> Path:
    """The file of a step in the folder of records."""
    return folder / f"step_{step:08}.safetensors"


def record_files(folder: Path) -> dict[int, Path]:
    """The files of a folder of records, by step; other files are ignored."""
    matches = ((_FILE.fullmatch(path.name), path) for path in folder.glob("step_*.safetensors"))
    return {int(match[1]): path for match, path in matches if match}


def _spread(values: np.ndarray, response: np.ndarray) -> list[float | None]:
    """Values of the response tokens at their positions among all tokens; None elsewhere."""
    known = iter([value if math.isfinite(value) else None for value in values.tolist()])
    return [next(known) if sampled else None for sampled in response.tolist()]
