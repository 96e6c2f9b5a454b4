"""Settings of `hybrid-rlhf port`."""

from __future__ import annotations

from typing import Literal

from hybrid_rlhf.configs.sections.rules import Count, Settings, require

SystemName = Literal["", "trl", "openrlhf", "verl", "llamafactory", "axolotl"]
StepName = Literal["sft", "reward", "preference", "rl"]


class PortConfig(Settings):
    """Write the configuration of a run of another system as one of this project. Files are read, nothing is
    executed."""

    source: str = ""
    """A YAML file, shell script or Python script, or a whole command in quotes."""
    system: SystemName = ""
    """System that it is for; --from is the same."""
    output: str = "run.yaml"
    """File to write."""
    step: StepName | None = None
    """Step that the run is; null: inferred from the program or trainer."""
    processes: Count = 1
    """Processes (GPUs) of the run, by which TRL, LLaMA-Factory and axolotl multiply batch sizes."""
    overwrite: bool = False
    """Replace an existing output."""

    def _check(self) -> None:
        require(self.source, "port needs a file or a command, got none: give for example train.sh --from verl")
        require(
            self.system,
            "port must know the system of the file, got none: give --from trl, openrlhf, verl, llamafactory or axolotl",
        )
