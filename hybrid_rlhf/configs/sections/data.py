"""Settings of data: the sources of rows and their tokenization."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.sections.rules import (
    Count,
    RowTokens,
    Settings,
    ShareBelowOne,
    advanced,
    require,
    require_template_variables,
)


def require_shares(split: list[float]) -> None:
    """Raise UserError unless there is a share for each of the three steps."""
    require(
        len(split) == 3 and all(share >= 0 for share in split) and sum(split) > 0,
        f"data.split must be three shares, one per step, got {split}: give for example [2, 4, 4]",
    )


class DataSource(Settings):
    """One source of a blend."""

    path: str
    """A .jsonl, .json, .csv (each also as .gz or .zst), .parquet or .arrow file, a pattern or folder of them, a folder
    of datasets.save_to_disk, or a hub name."""
    weight: Annotated[float, Interval(gt=0, le=1000)] = 1.0
    """Passes over this source per epoch: 0.5 takes half of its rows, 2 takes each row twice."""
    split_name: str = "train"
    """Split to take from a hub name or a DatasetDict folder."""
    columns: dict[str, str] = {}
    """Names of the source's columns, by the name that steps read: {prompt: question, completion: answer}; a.b is
    the key b within column a."""


class DataConfig(Settings):
    """Where rows come from and how they become tokens."""

    sources: list[str | DataSource] = []
    """Training data: paths, or {path, weight, split_name, columns}, blended."""
    eval_sources: list[str | DataSource] = []
    """Evaluation data; if empty, eval_fraction of the sources is held out."""
    eval_fraction: ShareBelowOne = 0.05
    """Fraction of the rows held out if there are no eval_sources; 0: none."""
    max_eval_rows: Count = advanced(512)
    """Maximum number of rows to hold out or evaluate on."""
    split: list[float] | None = advanced(None)
    """Relative sizes of the three steps' parts of one data set, without overlap, e.g. [2, 4, 4] (DeepSpeed-Chat)."""
    too_long: Literal["truncate", "drop"] = "drop"
    """Rows that are too long are truncated or dropped, counted and reported. A truncated prompt keeps BOS and the
    system message."""
    cache_dir: str | None = advanced(None, mutable=True)
    """Folder for tokenized rows; null: ~/.cache/hybrid_rlhf."""
    max_image_pixels: Count = advanced(2**20)
    """Width times height to which larger images are scaled down, before the model's processor scales them."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template and is saved with the model; null: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = advanced({})
    """Variables of the chat template, such as {enable_thinking: false}; saved with the model as its defaults."""

    def _check(self) -> None:
        require_template_variables(self.chat_template_kwargs)
        if self.split is not None:
            require_shares(self.split)

    def require_sources(self) -> None:
        """Raise UserError unless there is training data."""
        require(
            self.sources,
            "data.sources must have at least one file, folder or hub name, got none: set --data.sources FILE.jsonl",
        )


class RowDataConfig(DataConfig):
    """Sources of prompt and completion rows, and their tokenization."""

    max_length: RowTokens = 1024
    """Longest row, in tokens, prompt and completion together (1024: TRL's SFT default)."""
