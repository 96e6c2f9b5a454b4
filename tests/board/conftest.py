"""A run that was really made, once for the tests of jobs over the API and in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_main
from tests.support.runs import rl_line
from tests.support.steps import write_rows

REWARD = '{name: length, function: "tests.support.board:length_reward"}'


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder with the RL run `rl` of two steps, with samples and tokens of both."""
    folder = tmp_path_factory.mktemp("trained")
    more = ["--logging.samples_every", "1", "--reward.components", f"[{REWARD}]"]
    line = rl_line(folder / "output" / "rl", model_folder, write_rows(folder / "rows.jsonl"), *more)
    run_main("hybrid_rlhf.cli.rl", 1, line[1:])
    return folder / "output"
