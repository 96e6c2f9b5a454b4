"""Settings of `hybrid-rlhf replay`."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Interval

from hybrid_rlhf.configs.sections.rules import Count, Settings, advanced, require


class BranchConfig(Settings):
    """Other continuations of a sample, with the weights of its step, and their scores."""

    token: Annotated[int, Interval(ge=1), "give a position beyond the prompt's tokens"] = 0
    """Position at which the continuations begin, among the tokens of prompt and completion; earlier tokens are kept."""
    text: str | None = None
    """Text that replaces the token at this position; null: the token is sampled again."""
    n: Count = 4
    """Number of continuations."""


class RescoreConfig(Settings):
    """The score of another completion of the sample's prompt, with the run's reward components."""

    completion: str = ""
    """Text to score, as a completion that ended normally."""


class ReplayConfig(Settings):
    """Regenerate samples of an RL run bit for bit, and compare them with the recorded ones."""

    path: str = ""
    """Folder of the run; it is not modified."""
    step: int = 0
    """A step of samples.jsonl."""
    index: list[Annotated[int, Interval(ge=0), "leave the others out"]] = []
    """Rows of the step, their `index` in samples.jsonl; empty: all."""
    branch: BranchConfig | None = None
    rescore: RescoreConfig | None = None
    scratch: str | None = advanced(None)
    """Internal: temporary folder shared by the ranks of a replay, which the command creates and removes."""

    def _check(self) -> None:
        require(
            self.path, "a run must be named, got none: give its folder, for example hybrid-rlhf replay output/step3_ppo"
        )
        require(
            self.step >= 1, f"step must be one of samples.jsonl, got {self.step or 'none'}: give for example --step 1"
        )
        for name in ("branch", "rescore"):
            require(
                getattr(self, name) is None or len(self.index) == 1,
                f"{name} is for one sample, got index {self.index}: give --index with one",
            )
        require(self.branch is None or self.rescore is None, "branch and rescore are two requests: leave one out")
