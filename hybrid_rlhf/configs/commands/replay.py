"""Settings of `hybrid-rlhf replay`."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.configs.sections.rules import require, setting


@dataclass(frozen=True, kw_only=True)
class BranchConfig:
    """Other continuations of a sample, by the weights of its step, with their scores."""

    token: int = 0
    """Position at which they begin, among the tokens of prompt and completion: those before it are kept."""
    text: str | None = None
    """Text that they begin with in place of the token at that position; null: none, the token is sampled anew."""
    n: int = 4
    """How many."""

    def __post_init__(self) -> None:
        require(
            self.token >= 1,
            f"branch.token must be a position in the completion, got {self.token}: give one beyond the prompt's tokens",
        )
        require(self.n >= 1, f"branch.n must be 1 or more, got {self.n}: raise it")


@dataclass(frozen=True, kw_only=True)
class RescoreConfig:
    """The score of another completion of the sample's prompt, by the run's reward components."""

    completion: str = ""
    """Text to be scored, as a completion that ended by itself."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Generate samples of an RL run again, bit for bit, and compare them with what the run recorded."""

    path: str = ""
    """Folder of the run; it is only read."""
    step: int = 0
    """A step of samples.jsonl."""
    index: list[int] = field(default_factory=list)
    """Rows of the step, their `index` in samples.jsonl; empty: all."""
    branch: BranchConfig | None = None
    rescore: RescoreConfig | None = None
    scratch: str | None = setting(None, advanced=True)
    """Folder that the ranks of a replay share; the command creates it, starts them and removes it. null: this is the
    command."""

    def __post_init__(self) -> None:
        require(
            bool(self.path),
            "a run must be named, got none: give its folder, for example hybrid-rlhf replay output/step3_ppo",
        )
        require(self.step >= 1, f"step must be a step of samples.jsonl, got {self.step}: give --step")
        require(
            all(index >= 0 for index in self.index),
            f"index must have rows from 0 on, got {self.index}: leave the others out",
        )
        for name, value in (("branch", self.branch), ("rescore", self.rescore)):
            require(
                value is None or len(self.index) == 1,
                f"{name} is for one sample, got index {self.index}: give --index with one",
            )
        require(self.branch is None or self.rescore is None, "branch and rescore are two requests: leave one out")
