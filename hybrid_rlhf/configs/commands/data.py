"""Settings of `hybrid-rlhf data check`, `convert`, `split` and `blend`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rules import (
    Count,
    Natural,
    RowTokens,
    Settings,
    advanced,
    require,
    require_template_variables,
)

CheckedTask = Literal["auto", "sft", "reward", "preference", "rl"]
FormatName = Literal[
    "auto",
    "hh",
    "sharegpt",
    "alpaca",
    "openassistant",
    "ultrafeedback",
    "helpsteer2",
    "helpsteer3",
    "nectar",
    "openai_comparisons",
    "query",
    "openai_messages",
]
RankedAs = Literal["ranks", "pairs", "messages"]
_NO_OUTPUT = "--output must name a file, got none: give for example --output rows.jsonl"
_PARTS_EXAMPLE = "train=0.9,test=0.1"


class _SourceConfig(Settings):
    """Settings of a command on the rows of a source."""

    path: str = ""
    """A .jsonl, .json, .csv, .parquet or .arrow file, a pattern or folder of them, a folder of datasets.save_to_disk,
    or a hub name."""

    def _check(self) -> None:
        require(self.path, "a data source must be named, got none: give a file, a folder or a hub name")


class CheckConfig(_SourceConfig):
    """Read all rows of a source as a training step does, and report columns, lengths, problems and duplicates; exit
    code 1 if there is a problem, a duplicate, or a held-out row with a prompt of the source."""

    task: CheckedTask = "auto"
    """Step that the rows are for; auto: inferred from the columns of the first row."""
    tokenizer: str | None = None
    """Model whose tokenizer and chat template are used: a folder, a hub name, or "embedded"; null: no lengths, loss
    masks and previews."""
    max_length: RowTokens | None = None
    """Longest row, or prompt for RL, in tokens; null: the step's default."""
    eval_sources: list[str] = []
    """Sources of held-out rows; those with a prompt of the source are reported."""
    preview: Natural = 3
    """Number of rows to show as the model reads them."""
    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer. Only for sources you trust."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; null: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = advanced({})
    """Variables of the chat template, such as {enable_thinking: false}."""
    max_image_pixels: Count = advanced(2**20)
    """Width times height to which larger images are scaled down."""

    def _check(self) -> None:
        require_template_variables(self.chat_template_kwargs)


class ConvertConfig(_SourceConfig):
    """Convert a data set in a published format into rows that every step reads (docs/conversations.md)."""

    output: str = ""
    """JSONL file to write."""
    format: FormatName = "auto"
    """Format of the source; auto: inferred from the columns of its first row."""
    columns: dict[str, str] = advanced({})
    """Names of the source's columns, by the name that the format has: {conversations: dialog, output: reply}."""
    tags: dict[str, str] = advanced({})
    """Names of the keys and speakers of its turns, by those of ShareGPT: {from: speaker, value: text, human: me}."""
    ranked_as: RankedAs = "ranks"
    """How ranked completions (openassistant, ultrafeedback, helpsteer2, helpsteer3, nectar) are written. ranks: all of
    them, with ranks; pairs: the best and the worst as chosen and rejected; messages: conversations with the best."""
    skip_bad: bool = False
    """Omit rows that cannot be converted; otherwise the command fails on such a row and writes nothing."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def _check(self) -> None:
        require(self.output, _NO_OUTPUT)


class SplitConfig(_SourceConfig):
    """Split the rows of a source into files without prompts in common."""

    parts: str = ""
    """Names and shares of the parts, relative to their sum, such as train=0.9,test=0.1. Rows are assigned by a
    hash, so the sizes are approximate and a row stays in its part when others are added."""
    by: str = "prompt"
    """Key of the assignment of rows to parts: the prompt, or the name of a column."""
    seed: Natural = 0
    """Seed of the hash."""
    output_dir: str | None = None
    """Folder of the files, named after the source and the part: rows.train.jsonl; null: the source's own folder, or the
    current one for a hub name."""
    overwrite: bool = False
    """Replace files that exist."""

    def _check(self) -> None:
        names = [name for name, _ in self.shares]
        require(len(names) >= 2, f"parts must name two parts or more, got {self.parts!r}: for example {_PARTS_EXAMPLE}")
        require(len(set(names)) == len(names), f"a part is named once, got {self.parts!r}: keep one of each")
        for name in names:
            require(
                re.fullmatch(r"[\w-]+", name),
                f"a part's name has letters, digits, _ and -, got {name!r}: choose another, as in {_PARTS_EXAMPLE}",
            )

    @property
    def shares(self) -> list[tuple[str, float]]:
        """Name and share of each part."""
        words = [word.strip() for word in self.parts.split(",") if word.strip()]
        return read_shares(words, f"parts must be NAME=SHARE, comma-separated, for example {_PARTS_EXAMPLE}")


class BlendConfig(Settings):
    """Mix rows of several sources into one file in given fractions, without repeating rows."""

    sources: list[str] = []
    """SOURCE=SHARE for each source: a file, a folder or a hub name, and its fraction of the rows."""
    output: str = ""
    """JSONL file to write."""
    rows: Count | None = None
    """Number of rows to write; null: as many as the fractions allow."""
    seed: Natural = 0
    """Seed of the selection and order of rows."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def _check(self) -> None:
        paths = [path for path, _ in self.shares]
        require(paths, "sources must name data, got none: give for example a.jsonl=0.7 b.jsonl=0.3")
        require(
            len(set(paths)) == len(paths), f"a source is given once, got {' '.join(self.sources)}: keep one of each"
        )
        require(self.output, _NO_OUTPUT)

    @property
    def shares(self) -> list[tuple[str, float]]:
        """Path and share of each source."""
        return read_shares(self.sources, "sources must be SOURCE=SHARE, for example a.jsonl=0.7 b.jsonl=0.3")


def read_shares(words: Sequence[str], rule: str) -> list[tuple[str, float]]:
    """Names and shares, which are above 0, from words such as train=0.9.

    Raises:
        UserError: with a message that begins with the rule.
    """
    shares = []
    for word in words:
        name, _, text = word.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not name or not 0 < share < float("inf"):
            raise UserError(f"{rule}, got {word!r}: give a share above 0")
        shares.append((name, share))
    return shares
