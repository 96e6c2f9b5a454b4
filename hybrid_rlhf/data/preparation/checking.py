"""Checks a source for a step: each row is read and encoded as in training, and every problem is reported.

Nothing is trained or cached. Lengths are measured before truncation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.commands.data import CheckedTask
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.reward import RewardObjectiveConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sft import SFTDataConfig
from hybrid_rlhf.data.chat.template import WITHOUT_TEMPLATE, is_plain
from hybrid_rlhf.data.encoding import (
    Encode,
    earlier_turns_text,
    encode_labelled_row,
    encode_preference_row,
    encode_prompt_row,
    encode_sft_row,
    require_rendered,
)
from hybrid_rlhf.data.images.expansion import NO_IMAGES, ImageLayout, ImageRules
from hybrid_rlhf.data.images.references import ImageReference, tokenised_images
from hybrid_rlhf.data.preparation.splitting import prompt_key
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import (
    FORMS,
    STEPS,
    LabelledRow,
    PreferenceRow,
    form_of,
    is_tie,
    mixed_forms_text,
    read_label,
    read_labelled_row,
    read_preference_row,
    read_prompt_row,
    read_sft_row,
    read_stepwise_row,
    unreadable_row_error,
)
from hybrid_rlhf.data.rows.problems import RowProblems
from hybrid_rlhf.data.rows.published import published_format
from hybrid_rlhf.data.rows.sources import open_source
from hybrid_rlhf.data.rows.stepwise import encode_stepwise_row
from hybrid_rlhf.runtime.observability.progress import ProgressLog

Read = Callable[..., Any]
"""From the location of a row and the row; `refusal`, by name, says why it may have no images."""

_ANSWER = re.compile(
    r"(\w+_)?(responses?|outputs?|completions?|chosen|rejected|preferred|generations?)(_?\w+)?|kto_tag"
)
"""Columns with answers of models, from which a task is not guessed to be RL."""
_encode_steps = partial(encode_stepwise_row, separator=RewardObjectiveConfig().step_separator)
_READERS: dict[str, tuple[Read, Encode]] = {
    "sft": (read_sft_row, encode_sft_row),
    "rl": (read_prompt_row, encode_prompt_row),
    "labelled": (read_labelled_row, encode_labelled_row),
    "pairs": (read_preference_row, encode_preference_row),
    "steps": (read_stepwise_row, _encode_steps),
}
"""The functions that read and encode rows of each kind."""


@dataclass(frozen=True)
class RowPreview:
    """A row as the model reads it."""

    location: str
    spans: list[tuple[str, bool]]
    """Text, and true where it is learned: it carries loss, or is a completion that is compared."""
    learned_as: str
    """What the learned spans are: chosen, rejected, desirable, undesirable, compared with others, or loss."""
    tokens: int
    learned_tokens: int


@dataclass
class CheckReport:
    """Findings of a step in a source."""

    path: str
    task: CheckedTask
    limit: int
    """Longest row, or prompt for RL, in tokens."""
    rows: int = 0
    columns: Counter[str] = field(default_factory=Counter)
    """Number of rows that have each column."""
    forms: Counter[str] = field(default_factory=Counter)
    """Number of rows that are read in each form, such as "prompt + chosen + rejected"."""
    problems: RowProblems = field(default_factory=RowProblems)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each encoded row, with the longest completion where it has several; empty without a tokenizer."""
    image_tokens: list[int] = field(default_factory=list)
    """Tokens of the images of each encoded row that has any."""
    ties: int = 0
    """Number of rows that say that their completions are equally good; they are left out."""
    too_long: int = 0
    """Number of encoded rows beyond the limit: data.too_long drops or truncates them."""
    unusable: int = 0
    """Number of encoded rows with nothing to learn within the limit: always dropped."""
    unrendered: Counter[str] = field(default_factory=Counter)
    """Number of parts that the chat template does not render, by key, role or `tools`."""
    notes: list[str] = field(default_factory=list)
    """What is to be known about the rows and is no problem."""
    previews: list[RowPreview] = field(default_factory=list)
    duplicates: RowProblems = field(default_factory=RowProblems)
    """Rows whose columns that the step reads equal those of an earlier row."""
    overlap: RowProblems = field(default_factory=RowProblems)
    """Held-out rows that have the prompt of a row of the source."""

    @property
    def is_clean(self) -> bool:
        """True if there is nothing to correct."""
        return not self.problems.count and not self.duplicates.count and not self.overlap.count


def check_source(
    path: str,
    *,
    task: CheckedTask = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    limit: int | None = None,
    previews: int = 3,
    eval_sources: Sequence[str] = (),
    images: ImageRules = NO_IMAGES,
) -> CheckReport:
    """Read all rows of a source as a step does.

    Args:
        path: a file, a folder or a hub name.
        task: the step; auto: the first whose columns the first row has.
        tokenizer: tokenizer that encodes the rows; None: they are only read.
        limit: longest row, or prompt for RL, in tokens; None: the step's default.
        previews: number of rows to show.
        eval_sources: held-out rows, whose prompts are compared with those of the source.
        images: what becomes of images; without the layout of a model, and without a tokenizer, they are only read.

    Raises:
        UserError: if the source cannot be opened, or its step cannot be guessed.
    """
    source = open_source(path)
    progress = ProgressLog(f"checking {path}", total=source.count())
    report = CheckReport(path, task, limit or 0)
    problems = report.problems
    seen: dict[bytes, str] = {}
    prompts: dict[bytes, str] = {}
    for location, row in progress.track(source.readable_rows(problems.add)):
        if task != "rl" and is_tie(row):
            report.ties += 1
            continue
        if not report.rows:
            report.task = _guessed(location, row) if task == "auto" else task
            default = RolloutConfig().max_prompt_tokens if report.task == "rl" else SFTDataConfig().max_length
            report.limit = limit or default
        report.rows += 1
        report.columns.update(row.keys())
        with problems.collected():
            form, digests = _check_row(report, location, row, tokenizer, previews, images)
            read = [row[name] for name in (*form, "tools") if name in row]
            earlier = seen.setdefault(_digest([form, read, digests]), location)
            if earlier != location:
                report.duplicates.add(UserError(f"{location} repeats {earlier}"))
            if eval_sources:
                prompts.setdefault(_digest(prompt_key(location, row, images)), location)
    if not report.rows and not problems.count:
        found = f"{path} has only ties" if report.ties else f"{path} is empty"
        raise UserError(f"a data source must have rows, {found}: check the path")
    if report.rows:
        notes = [
            mixed_forms_text(report.forms),
            f"the tokenizer {WITHOUT_TEMPLATE}; give --chat_template FILE for another format"
            * (tokenizer is not None and is_plain(tokenizer) and not report.forms.keys() <= {"text", "segments"}),
            earlier_turns_text(report.unrendered) * (report.task != "reward"),
        ]
        report.notes += filter(None, notes)
        _find_overlap(report, prompts, eval_sources, images)
    return report


def _guessed(location: str, row: Row) -> CheckedTask:
    if published_format(row) is not None:
        raise unreadable_row_error(location, row, [])
    for task in FORMS:
        form = form_of(task, row)
        if form is None or (form == ("messages", "label") and read_label(row["label"]) is None):
            continue
        answer = next(filter(_ANSWER.fullmatch, row), None) if task == "rl" else None
        if answer is not None:
            raise UserError(
                f"{location}: a row of prompts for RL has no answers, got column {answer!r}: convert or rename it, or "
                "give --task rl to pass it to reward functions"
            )
        # The reward model and preference losses read the same pairs.
        return "preference" if task == "reward" and form != STEPS else cast(CheckedTask, task)
    wanted = [" + ".join(form) for forms in FORMS.values() for form in forms]
    raise unreadable_row_error(location, row, list(dict.fromkeys(wanted)))


def _readers(task: CheckedTask, form: tuple[str, ...]) -> tuple[Read, Encode]:
    if task in ("sft", "rl"):
        return _READERS[task]
    return _READERS["labelled" if "label" in form else "steps" if form == STEPS else "pairs"]


def _find_overlap(
    report: CheckReport, prompts: Mapping[bytes, str], eval_sources: Sequence[str], images: ImageRules
) -> None:
    """Report the held-out rows whose prompt occurs in the source, with the locations of both."""
    for source in eval_sources:
        for location, row in open_source(source):
            with report.problems.collected():
                earlier = prompts.get(_digest(prompt_key(location, row, images)))
                if earlier is not None:
                    report.overlap.add(UserError(f"{location} has the prompt of {earlier}"))


def _digest(content: Any) -> bytes:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _check_row(
    report: CheckReport,
    location: str,
    row: Row,
    tokenizer: PreTrainedTokenizerBase | None,
    previews: int,
    images: ImageRules,
) -> tuple[tuple[str, ...], list[str]]:
    """Returns the row's form, and the digests of its images."""
    form = form_of(report.task, row)
    if form is None:
        raise unreadable_row_error(location, row, [" + ".join(form) for form in FORMS[report.task]])
    read, encode = _readers(report.task, form)
    if tokenizer is None:
        record = read(location, row, refusal=images.refusal)
        has_groups = isinstance(record, (PreferenceRow, LabelledRow))
        shown = images.references(location, [*chain.from_iterable(record.images)] if has_groups else record.images)
    else:
        encoded = encode(location, row, tokenizer, report.limit, images=images)
        for encoded_row in encoded:
            require_rendered(location, row, encoded_row["ignored"])
        shown = [image for encoded_row in encoded for image in tokenised_images(encoded_row)]
        report.lengths += [encoded_row["full_length"] for encoded_row in encoded]
        report.image_tokens += filter(None, (images.tokens(tokenised_images(encoded_row)) for encoded_row in encoded))
        report.too_long += sum(encoded_row["cut"] for encoded_row in encoded)
        report.unusable += sum(not encoded_row["usable"] for encoded_row in encoded)
        report.unrendered.update(key for encoded_row in encoded for key in json.loads(encoded_row["ignored"]))
        if report.rows <= previews:
            report.previews += [
                _preview(location, *part, tokenizer, images)
                for encoded_row in encoded
                for part in _sequences(encoded_row, report.task)
            ]
    report.forms[" + ".join(form)] += 1
    return form, [image.digest for image in shown]


def _sequences(
    encoded: dict[str, Any], task: CheckedTask
) -> list[tuple[list[int], list[bool], str, list[ImageReference]]]:
    """Token ids of an encoded row, with the mask of learned tokens, what these are, and its images."""
    images = tokenised_images(encoded)
    if "masks" not in encoded:
        mask = encoded.get("loss_mask") or [False] * len(encoded["input_ids"])
        return [(encoded["input_ids"], mask, "loss", images)]
    names = ["compared" if task == "reward" else "loss"] * len(encoded["responses"])
    if len(pairs := encoded.get("pairs", ())) == 1:
        for index, name in zip(pairs[0], ("chosen", "rejected"), strict=True):
            names[index] = name
    elif len(labels := encoded.get("labels", ())) == len(names):
        names = ["desirable" if label else "undesirable" for label in labels]
    orders = encoded.get("image_order") or [range(len(images))] * len(names)
    shown = [[images[index] for index in order] for order in orders]
    return list(zip(encoded["responses"], encoded["masks"], names, shown, strict=True))


def _preview(
    location: str,
    ids: list[int],
    mask: list[bool],
    learned_as: str,
    shown: list[ImageReference],
    tokenizer: PreTrainedTokenizerBase,
    images: ImageRules,
) -> RowPreview:
    edges = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
    spans = [(str(tokenizer.decode(ids[a:b])), mask[a]) for a, b in zip(edges, edges[1:], strict=False) if a < b]
    following = list(shown)
    spans = [(_with_sizes(text, following, tokenizer, images.layout), has_loss) for text, has_loss in spans]
    return RowPreview(location, spans, learned_as, len(ids), sum(mask))


def _with_sizes(
    text: str, following: list[ImageReference], tokenizer: PreTrainedTokenizerBase, layout: ImageLayout | None
) -> str:
    """A text with the sizes of its images, which are taken from those that follow, in place of their tokens."""
    shown = ""
    while following and layout is not None:
        image = following[0]
        ids = layout.expansion(image.width, image.height)
        before, found, after = text.partition(str(tokenizer.decode(ids)))
        if not found:
            break
        shown += f"{before}[image {image.width}x{image.height}: {len(ids):,} tokens]"
        text = after
        del following[0]
    return shown + text
