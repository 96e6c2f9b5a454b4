"""Two hosts for the tests of a file, and a run on one of them that others must equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host_runs import Training, train_line
from tests.support.hosts import Network, network, why_no_hosts
from tests.support.steps import run_outputs


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts."""
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    with network(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def training(hosts: Network, model_folder: Path, pair_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run with two ranks on one host."""
    output = tmp_path_factory.mktemp("one_host")
    done = hosts["node1"].run(train_line(output, model_folder, pair_rows, "--launcher.num_processes", "2"))
    assert done.returncode == 0, done.stdout
    return Training(model_folder, pair_rows, run_outputs(output / "step1_sft"), output / "logs" / "step1_sft.yaml")
