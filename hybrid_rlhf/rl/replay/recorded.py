"""Records of one step of a run: rows of samples.jsonl, token records, its config, the checkpoint before it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.files.checkpoint_folder import newest_valid, read_manifest
from hybrid_rlhf.runtime.observability.samples import SAMPLES_FILE
from hybrid_rlhf.runtime.observability.token_records import ENVIRONMENT, TokenRecord, TokenRecords
from hybrid_rlhf.runtime.run import CONFIG_FILE

_STEP = re.compile(r'\{"step": (\d+),')
_SHOWN_STEPS = 8


@dataclass(frozen=True)
class RecordedStep:
    """One step of a run folder, which is opened for reading only."""

    folder: Path
    step: int
    rows: list[dict[str, Any]]
    """Rows of samples.jsonl, in their order."""

    @classmethod
    def read(cls, folder: Path, step: int) -> Self:
        """The records of a step.

        Raises:
            UserError: if the folder has no samples, or none of this step.
        """
        file = folder / SAMPLES_FILE
        require(
            file.is_file() and (folder / CONFIG_FILE).is_file(),
            f"a replay needs the folder of an RL run with {CONFIG_FILE} and {SAMPLES_FILE}, {folder} is none: check "
            "the path, and that logging.samples_every is not 0",
        )
        steps = dict[int, None]()
        rows = []
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if (match := _STEP.match(line)) is None or not line.endswith("\n"):
                    break  # the run is writing it
                steps[int(match[1])] = None
                if int(match[1]) == step:
                    rows.append(json.loads(line))
        nearest = sorted(sorted(steps, key=lambda recorded_step: abs(recorded_step - step))[:_SHOWN_STEPS])
        require(
            bool(rows),
            f"step must be one that {file} has, got {step}: give for example {' or '.join(map(str, nearest))}",
        )
        return cls(folder.resolve(), step, rows)

    def sample(self, index: int) -> dict[str, Any]:
        """The row of a sample.

        Raises:
            UserError: if there is no such sample.
        """
        require(
            index < len(self.rows),
            f"index must be below the {len(self.rows)} samples of step {self.step}, got {index}: give another",
        )
        return self.rows[index]

    def tokens(self, index: int) -> TokenRecord | None:
        """The tokens of a sample; None without a token record of the step."""
        return None if self._details is None else TokenRecords(self.folder).read(self.step, index)

    @property
    def ranks(self) -> int:
        """Number of ranks that sampled the step; 1 if it is not recorded."""
        if self._details is not None:
            return int(self._details["ranks"])
        checkpoint = newest_valid(self.folder, before=self.step)
        return 1 if checkpoint is None else int(read_manifest(checkpoint)["world_size"])

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this process, with the recorded variables that decide in which order numbers are
        summed."""
        if self._details is None:
            return dict(os.environ)
        unrelated = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        return unrelated | self._details["environment"]

    @cached_property
    def config(self) -> RLConfig:
        """The config of the run, as its last start wrote it."""
        return parse_config(RLConfig, ["--config", str(self.folder / CONFIG_FILE)])

    def resumed_config(self, scratch: Path) -> RLConfig:
        """The config of a run in a scratch folder that resumes before the step and computes its rollout."""
        config = self.config
        resume = "never" if config.resume == "auto" else config.resume
        checkpoint = newest_valid(self.folder, before=self.step)
        return replace(
            config,
            output_dir=str(scratch),
            resume=resume if checkpoint is None else str(checkpoint),
            logging=replace(config.logging, samples_every=0, sinks=[], webhook=None, profile_steps=[]),
        )

    @cached_property
    def _details(self) -> dict[str, Any] | None:
        """How the step was computed; None without a token record."""
        records = TokenRecords(self.folder)
        if self.step not in records.steps():
            return None
        try:
            return records.details(self.step)
        except ValueError as error:
            raise UserError(f"{error}: remove it, and the replay compares texts") from error


def require_one_turn(config: RLConfig) -> None:
    """Raise UserError for a run whose completions have turns of an environment, which no branch continues."""
    require(
        config.environment is None,
        "a branch continues a completion of one turn, the run has an environment: leave branch out",
    )


def require_in_completion(record: TokenRecord, token: int) -> None:
    """Raise UserError for a token at which no branch of a sample begins."""
    first, last = record.prompt_length, len(record.ids) - 1
    require(
        first <= token <= last, f"branch.token must be in the completion, {first}..{last}, got {token}: give another"
    )
