"""Two hosts for the tests of a file, and a run on one of them that others must equal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Network, network, why_no_hosts
from tests.support.steps import run_outputs

STEPS = 40
SAVE_EVERY = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts."""
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    with network(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@dataclass(frozen=True)
class Training:
    """The command lines of one training run, which others repeat elsewhere."""

    model: Path
    rows: Path
    outputs: dict[str, Any]
    """Of the run on one host with two ranks."""
    config: Path
    """Settings of its step."""

    def line(self, output: Path, *more: str) -> list[str]:
        """`train` of the step SFT."""
        return train_line(output, self.model, self.rows, *more)


def train_line(output: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """`train` of 40 updates of SFT with a checkpoint after every fourth."""
    line = f"{sys.executable} train.py --steps sft --base_model {model} --data.sources {rows} --output_dir {output}"
    line += f" --sft.train.max_steps {STEPS} --sft.train.epochs 99 --sft.train.save_every {SAVE_EVERY}"
    line += f" --sft.train.global_batch_size 4 --sft.data.max_length 64 --sft.data.cache_dir {rows.parent}/cache"
    return [*line.split(), "--sft.logging.sinks", "[]", *more]


@pytest.fixture(scope="module")
def training(hosts: Network, model_folder: Path, pair_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run with two ranks on one host."""
    output = tmp_path_factory.mktemp("one_host")
    done = hosts["node1"].run(train_line(output, model_folder, pair_rows, "--launcher.num_processes", "2"))
    assert done.returncode == 0, done.stdout
    return Training(model_folder, pair_rows, run_outputs(output / "step1_sft"), output / "logs" / "step1_sft.yaml")
