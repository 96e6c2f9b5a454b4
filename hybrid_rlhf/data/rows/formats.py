"""Row formats: reads a row into the record of a training step. Errors name file, line and column.

| step | columns |
|---|---|
| SFT | messages; prompt + completion; prompt + chosen; text; segments |
| reward, preference | prompt + chosen + rejected (messages may begin with it), margin; or prompt + responses + ranks |
| KTO, reward from labels | prompt + completion + label; messages + label; or a pair: chosen is desirable |
| process reward | prompt + completions (the steps of one completion) + labels |
| RL | prompt; or messages, without their last assistant turn; other columns are passed to reward functions |

Names and meanings are those of TRL's data sets; `responses` + `ranks` follows InstructGPT (arXiv 2203.02155), section
3.5. A row with `tie: true` is left out. Any row may have `tools`: JSON schemas of the functions that the assistant may
call, and `images` (or `image`) where the model reads them; see placing.py. A message keeps all its keys.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import (
    REASONING_KEYS,
    WEIGHT_KEY,
    Message,
    Tools,
    continued_turn,
    is_learned,
    read_message,
    row_tools,
    with_ordered_results,
)
from hybrid_rlhf.data.images.expansion import IMAGES_KEY, TEXT_ONLY
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.placing import IMAGE_COLUMNS, awaiting_images, place_images
from hybrid_rlhf.data.rows.published import (
    CONVERTED,
    LABELS,
    REJECTED,
    answers_messages,
    is_query,
    published_format,
)
from hybrid_rlhf.data.rows.sources import missing_columns_error
from hybrid_rlhf.runtime.observability.logs import shortened

_SYSTEM_ROLES = ("system", "developer")
_PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")
_OBJECT_WITH_MESSAGES = re.compile(r'\s*\{\s*"(messages|conversations)"\s*:\s*\[')
_MEDIA = tuple(f"{side}{kind}" for side in ("", "rejected_") for kind in ("images", "videos", "audios")) + (
    *("image", "video", "audio"),
)
_OF_ALL_ROWS = {
    "chat_template_kwargs": "set data.chat_template_kwargs for all rows, and remove the column",
    "rejected_tools": "remove the column if both answers have the same tools, or remove the row",
}
"""Columns of ms-swift that change how a row is rendered, and what to do instead."""

STEPS = ("prompt", "completions", "labels")
_PAIRS = (
    ("prompt", "responses", "ranks"),
    ("prompt", "completion", "label"),
    ("messages", "label"),
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
)
FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "reward": (STEPS, *_PAIRS),
    "preference": _PAIRS,
    "sft": (("messages",), ("prompt", "completion"), ("prompt", "chosen"), ("chosen",), ("text",), ("segments",)),
    "rl": (("prompt",), ("messages",)),
}
"""The columns of each step's rows, in the reader's order of preference. Steps are in the order in which they are
guessed, because a row with more columns also fits later steps."""


@dataclass(frozen=True)
class ConversationRow:
    """A row for SFT: messages, or plain text."""

    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    context: str = ""
    """Text that precedes `text`, without loss."""
    segments: list[tuple[str, bool]] = field(default_factory=list)
    """The parts of `text`, and which of them carry loss; if there are none, all of it does."""
    tools: Tools | None = None
    continued: int | None = None
    """Index of an assistant turn, the last of the prompt, that the next turn continues."""
    images: list[Any] = field(default_factory=list)
    """In the order of their marks, as given."""


@dataclass(frozen=True)
class PreferenceRow:
    """Completions of one prompt and the preferences between them."""

    prompt: list[Message]
    completions: list[list[Message]]
    pairs: list[tuple[int, int]]
    """(chosen, rejected), indices of completions."""
    margins: list[float]
    """The margin of each pair, by default 0."""
    tools: Tools | None = None
    images: Sequence[list[Any]] = ()
    """Those of the prompt, then those of each completion."""


@dataclass(frozen=True)
class LabelledRow:
    """Completions of one prompt, each with a label."""

    prompt: list[Message]
    completions: list[list[Message]]
    labels: list[bool]
    """True for each completion that is desirable."""
    tools: Tools | None = None
    images: Sequence[list[Any]] = ()
    """Those of the prompt, then those of each completion."""


@dataclass(frozen=True)
class StepwiseRow:
    """A completion in steps, each with a label."""

    prompt: list[Message]
    steps: list[str]
    labels: list[float]
    """In [0, 1]; 1 means correct."""
    tools: Tools | None = None
    images: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class PromptRow:
    """A prompt for RL, and the other columns of its row."""

    messages: list[Message]
    columns: dict[str, Any]
    """Other columns of the row; they include `tools`, as stored, and no images."""
    tools: Tools | None = None
    images: list[Any] = field(default_factory=list)


def form_of(step: str, row: Row) -> tuple[str, ...] | None:
    """The columns by which a step reads a row, a value of `FORMS`; None if it has none of them."""
    return next((columns for columns in FORMS[step] if set(columns) <= set(row)), None)


def mixed_forms_text(forms: Counter[str]) -> str:
    """The numbers of rows of different forms in a source; empty if all have one. A row without a name is left out."""
    named = [(form, count) for form, count in forms.most_common() if form]
    kinds = ", ".join(f"{form} ({count:,})" for form, count in named)
    return f"rows of {len(named)} kinds are mixed; a step reads each by its columns: {kinds}" * (len(named) > 1)


def is_tie(row: Row) -> bool:
    """Return True if a row says that its completions are equally good: there is nothing to learn from it."""
    return row.get("tie") is True and "completion" not in row and "messages" not in row


def read_sft_row(location: str, row: Row, *, refusal: str = TEXT_ONLY) -> ConversationRow:
    """Read a row for SFT; a tie has no messages."""
    if is_tie(row):
        return ConversationRow()
    continued = None
    _require_whole(location, row, refusal)
    if "text" not in row:
        _refuse_preferences(location, row)
    column = "completion" if "completion" in row else "chosen"
    if "messages" in row:
        messages = _messages(location, row, "messages")
    elif "prompt" in row and column in row:
        prompt, (completion,) = _completed(location, row, (column, row[column]))
        messages = prompt + completion
        continued = continued_turn(prompt, completion)
    elif "chosen" in row and not isinstance(row["chosen"], str):
        messages = _messages(location, row, "chosen")
    elif "text" in row:
        return _plain_row(location, row)
    elif "segments" in row:
        _require_no_images(location, row)
        segments = _segments(location, row["segments"])
        return ConversationRow(text="".join(text for text, _ in segments), segments=segments)
    else:
        raise unreadable_row_error(location, row, ["messages", "prompt + completion", "prompt + chosen", "text"])
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(
            f"{location}: a conversation for SFT must have an assistant turn, got none: add one or remove the row"
        )
    if not any(map(is_learned, messages)):
        raise UserError(
            f"{location}: a conversation for SFT must have an assistant turn of weight 1, got weight 0 for each: set "
            "one to 1 or remove the row"
        )
    (images,) = place_images(location, row, messages, refusal=refusal)
    return ConversationRow(messages, tools=row_tools(location, row), continued=continued, images=images)


def _plain_row(location: str, row: Row) -> ConversationRow:
    """A row of plain text, in which all tokens carry loss, which those of images cannot."""
    _require_no_images(location, row)
    return ConversationRow(text=text_column(location, row, "text"))


def _require_no_images(location: str, row: Row) -> None:
    column = next((name for name in IMAGE_COLUMNS if row.get(name)), None)
    if column is not None:
        raise UserError(
            f"{location}: rows of plain text have no images, got column {column!r}: give messages or a prompt"
        )


def _segments(location: str, value: Any) -> list[tuple[str, bool]]:
    """The texts of a row without a chat template, and which of them carry loss (axolotl's input_output)."""
    listed = [segment if isinstance(segment, dict) else {} for segment in value] if isinstance(value, list) else [{}]
    segments = [(segment.get("text"), read_label(segment.get("label"))) for segment in listed]
    if not all(isinstance(text, str) and label is not None for text, label in segments):
        raise UserError(
            f"{location}: column 'segments' must be a list of {{'text': ..., 'label': true or false}}, got "
            f"{shortened(str(value))}: fix the row"
        )
    if not any(label and text for text, label in segments):
        raise UserError(f"{location}: column 'segments' must have a text with label true, got none: remove the row")
    return [(str(text), bool(label)) for text, label in segments]


def read_preference_row(location: str, row: Row, *, refusal: str = TEXT_ONLY) -> PreferenceRow:
    """Read a row of preferences; a tie has no completions."""
    if is_tie(row):
        return PreferenceRow([], [], [], [])
    _require_whole(location, row, refusal)
    if "responses" in row and "ranks" in row:
        return _ranked(location, row, refusal)
    if "chosen" not in row or "rejected" not in row:
        raise unreadable_row_error(location, row, ["prompt + chosen + rejected", "prompt + responses + ranks"])
    if row["chosen"] == row["rejected"]:
        raise UserError(
            f"{location}: columns 'chosen' and 'rejected' must differ, both are {shortened(str(row['chosen']))!r}: "
            "change one or remove the row"
        )
    answers = [(name, row[name]) for name in ("chosen", "rejected")]
    texts = [(name, answer) for name, answer in answers if isinstance(answer, str)]
    for name, text in texts:
        _refuse_written_messages(location, name, text)
    if "prompt" in row:
        prompt, completions = _completed(location, row, *answers)
    elif texts:
        # Their common prefix is not a turn: a template would render it as part of the assistant's.
        raise UserError(
            f"{location}: columns 'chosen' and 'rejected' with text need a prompt, got none: add it, convert dialogues "
            "with hybrid-rlhf data convert, or remove the row"
        )
    else:
        whole = [_messages(location, row, name) for name, _ in answers]
        shared = shared_prefix(*whole)
        prompt = whole[0][:shared]
        completions = [turns[shared:] for turns in whole]
    for (name, _), completion in zip(answers, completions, strict=True):
        _require_assistant(location, name, completion)
    margin = number_column(location, row, "margin") if "margin" in row else 0.0
    images = place_images(location, row, prompt, *completions, refusal=refusal)
    return PreferenceRow(prompt, completions, [(0, 1)], [margin], row_tools(location, row), images)


def read_labelled_row(location: str, row: Row, *, refusal: str = TEXT_ONLY) -> LabelledRow:
    """Read a row of labelled completions: one with its label, or those of preference pairs."""
    if "label" not in row:
        record = read_preference_row(location, row, refusal=refusal)
        chosen, rejected = ({pair[side] for pair in record.pairs} for side in (0, 1))
        indices = sorted(chosen ^ rejected)  # a completion that is chosen and rejected in different pairs has no label
        completions = [record.completions[i] for i in indices]
        images = [*record.images[:1], *(record.images[1 + i] for i in indices)]
        return LabelledRow(record.prompt, completions, [i in chosen for i in indices], record.tools, images)
    _require_whole(location, row, refusal)
    parts = {"prompt", "completion"}
    whole = "messages" in row and not parts & set(row)
    if not whole and not parts <= set(row):
        wanted = ["prompt + completion + label", "messages + label", "prompt + chosen + rejected"]
        raise unreadable_row_error(location, row, wanted)
    label = read_label(row["label"])
    if label is None:
        raise UserError(
            f"{location}: column 'label' must be true (desirable) or false (undesirable), got {row['label']!r}: fix "
            "the row"
        )
    if whole:
        *prompt, last = _messages(location, row, "messages")
        completion = [last]
    else:
        prompt, (completion,) = _completed(location, row, ("completion", row["completion"]))
    _require_assistant(location, "messages" if whole else "completion", completion)
    placed = place_images(location, row, prompt, completion, refusal=refusal)
    return LabelledRow(prompt, [completion], [label], row_tools(location, row), placed)


def read_stepwise_row(location: str, row: Row, *, refusal: str = TEXT_ONLY) -> StepwiseRow:
    """Read a row with the steps of a completion (stepwise supervision)."""
    _require_whole(location, row, refusal)
    if not set(STEPS) <= set(row):
        raise unreadable_row_error(location, row, ["prompt + completions + labels"])
    steps, labels = _equal_lists(location, row, "completions", "labels")
    texts = [text_column(location, {"completions": step}, "completions") for step in steps]
    wrong = [label for label in labels if not (isinstance(label, bool) or is_number(label)) or not 0 <= label <= 1]
    if wrong:
        raise UserError(
            f"{location}: column 'labels' must contain true, false or numbers in [0, 1], got {wrong[0]!r}: fix the row"
        )
    prompt = _turns(location, row, "prompt", role="user")
    (images,) = place_images(location, row, prompt, refusal=refusal)
    return StepwiseRow(prompt, texts, [float(label) for label in labels], row_tools(location, row), images)


def head_index(location: str, row: Row, heads: Sequence[str]) -> int:
    """The index of the reward head that a row trains; 0 without a column `head`."""
    name = row.get("head", heads[0])
    if name not in heads:
        raise UserError(f"{location}: column 'head' must be one of {', '.join(heads)}, got {name!r}: fix the row")
    return heads.index(name)


def read_prompt_row(location: str, row: Row, *, refusal: str = TEXT_ONLY) -> PromptRow:
    """Read a row of prompts for RL."""
    _require_whole(location, row, refusal, [column for column in CONVERTED if column != "history"])
    if "prompt" in row:
        used = "prompt"
        messages = _turns(location, row, "prompt", role="user")
    elif "messages" in row:
        used = "messages"
        messages = _messages(location, row, "messages")
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise UserError(
                f"{location}: column 'messages' must have a prompt, got only an assistant turn: add it or "
                "remove the row"
            )
    else:
        raise unreadable_row_error(location, row, ["prompt", "messages"])
    (images,) = place_images(location, row, messages, refusal=refusal)
    read = (used, *IMAGE_COLUMNS) if images else (used,)
    columns = {name: value for name, value in row.items() if name not in read}
    return PromptRow(messages, columns, row_tools(location, row), images)


def read_ptx_row(location: str, row: Row, *, refusal: str = TEXT_ONLY) -> ConversationRow:
    """Read a row of pretraining text, or a conversation."""
    return _plain_row(location, row) if "text" in row else read_sft_row(location, row, refusal=refusal)


def require_text(location: str, row: Row, refusal: str = TEXT_ONLY) -> None:
    """Refuse a row with images, videos or audio, which would be lost, or with settings of its own.

    Args:
        location: beginning of errors.
        row: row as read from its source.
        refusal: why there may be no images; empty: there may.

    Raises:
        UserError: with the name of the column.
    """
    own = next((name for name in _OF_ALL_ROWS if row.get(name)), None)
    if own is not None:
        raise UserError(
            f"{location}: all rows are rendered alike, got column {own!r} with {shortened(str(row[own]))}: "
            f"{_OF_ALL_ROWS[own]}"
        )
    media = _MEDIA if refusal == TEXT_ONLY else [name for name in _MEDIA if name not in IMAGE_COLUMNS]
    column = next((name for name in media if row.get(name)), None)
    if column is not None:
        raise UserError(
            f"{location}: a row must be text, got column {column!r} with {shortened(str(row[column]))}: remove the "
            "column if the text is complete without it, or remove the row"
        )


def _require_whole(location: str, row: Row, refusal: str, columns: Sequence[str] = CONVERTED) -> None:
    """Refuse a row with columns that only a conversion reads; see `require_text`."""
    require_text(location, row, refusal)
    if columns == CONVERTED and answers_messages(row):
        raise unreadable_row_error(location, row, ["prompt + chosen + rejected"])
    column = next((name for name in columns if row.get(name)), None)
    if column is not None:
        raise UserError(
            f"{location}: a row has its turns and tools in the columns of its step, got column {column!r} with "
            f"{shortened(str(row[column]))}: convert the row with hybrid-rlhf data convert, or remove the column"
        )


def read_label(value: Any) -> bool | None:
    """A label of KTO: true, false, 1, 0 or the text of the first two; None for anything else."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def _refuse_preferences(location: str, row: Row) -> None:
    """Refuse a row whose answer is undesirable, or one of two, as its columns say."""
    for column in LABELS:
        if column in row and read_label(row[column]) is not None:
            raise UserError(
                f"{location}: a row for SFT must have no label of its answer, got column {column!r} "
                f"{row[column]!r}: train on it with preference and objective.loss kto, or remove the column"
            )
    rejected = next((name for name in (*REJECTED, "rejected") if row.get(name)), None)
    if rejected is not None and "chosen" not in row:
        raise UserError(
            f"{location}: a row for SFT must have no rejected answer, got column {rejected!r}: convert it with "
            "hybrid-rlhf data convert for preference, or remove the column"
        )


def _ranked(location: str, row: Row, refusal: str) -> PreferenceRow:
    """All pairs of a ranked list, lower ranks first; equal ranks make no pair (InstructGPT, section 3.5)."""
    if "prompt" not in row:
        raise unreadable_row_error(location, row, ["prompt + responses + ranks"])
    responses, ranks = _equal_lists(location, row, "responses", "ranks", least=0)
    if not all(is_number(rank) for rank in ranks):
        raise UserError(f"{location}: column 'ranks' must contain finite numbers, got {ranks!r}: fix the row")
    prompt, completions = _completed(location, row, *(("responses", response) for response in responses))
    for completion in completions:
        _require_assistant(location, "responses", completion)
    pairs = [
        (i, j) if ranks[i] < ranks[j] else (j, i) for i, j in combinations(range(len(ranks)), 2) if ranks[i] != ranks[j]
    ]
    if not pairs:
        raise UserError(f"{location}: column 'ranks' must have two different ranks, got {ranks!r}: remove the row")
    images = place_images(location, row, prompt, *completions, refusal=refusal)
    for chosen, rejected in pairs:
        if completions[chosen] == completions[rejected]:
            raise UserError(
                f"{location}: column 'responses' must not rank a response above an equal one, got "
                f"{shortened(str(responses[chosen]))!r} twice: remove one"
            )
    return PreferenceRow(prompt, completions, pairs, [0.0] * len(pairs), row_tools(location, row), images)


def _require_assistant(location: str, column: str, completion: Sequence[Message]) -> None:
    """Raise an error unless a completion ends with an assistant turn that carries loss."""
    if not completion or completion[-1]["role"] != "assistant":
        ending = f"a turn of the {completion[-1]['role']}" if completion else "nothing after the prompt"
        raise UserError(
            f"{location}: column {column!r} must end with an assistant turn, got {ending}: add it or remove the row"
        )
    if not is_learned(completion[-1]):
        raise UserError(
            f"{location}: column {column!r} must end with an assistant turn of weight 1, got weight "
            f"{completion[-1][WEIGHT_KEY]}: remove the weight or remove the row"
        )


def _equal_lists(location: str, row: Row, *names: str, least: int = 1) -> list[list[Any]]:
    """The values of columns that are lists of equal length, of at least `least` items."""
    values = [row[name] for name in names]
    sizes = [len(value) if isinstance(value, list) else type(value).__name__ for value in values]
    if len({*sizes}) > 1 or not isinstance(sizes[0], int) or sizes[0] < least:
        raise UserError(
            f"{location}: columns {' and '.join(map(repr, names))} must be non-empty lists of equal length, got "
            f"{' and '.join(map(str, sizes))}: fix the row"
        )
    return values


def unreadable_row_error(location: str, row: Row, wanted: Sequence[str]) -> UserError:
    """The error for a row without the columns of any accepted form; it names the published format, if it has one."""
    published = published_format(row)
    if published is None:
        error = missing_columns_error(location, row, wanted)
        return UserError(f"{error}, or for SFT convert it with hybrid-rlhf data convert") if is_query(row) else error
    return UserError(
        f"{location}: a row must be in a form that steps read, got the format {published}: convert it with "
        "hybrid-rlhf data convert"
    )


def _turns(location: str, row: Row, column: str, *, role: str) -> list[Message]:
    """The turns in a column: messages, or text as one turn of the given role."""
    if isinstance(row[column], str):
        _refuse_written_messages(location, column, row[column])
        return [{"role": role, "content": text_column(location, row, column)}]
    return _messages(location, row, column)


def _refuse_written_messages(location: str, column: str, text: str) -> None:
    """Refuse text that has messages in another notation than a list in JSON, which is read as messages."""
    if _PYTHON_MESSAGES.match(text):
        raise UserError(
            f"{location}: column {column!r} must be text or messages, got messages in the notation of Python, "
            f"{shortened(text)!r}: write them with json.dumps, or fix the row"
        )
    if _OBJECT_WITH_MESSAGES.match(text):
        raise UserError(
            f"{location}: column {column!r} must be text or messages, got an object with messages as text, "
            f"{shortened(text)!r}: give its messages, and its tools in the column 'tools', or fix the row"
        )


def column(location: str, row: Row, name: str, kind: type, what: str) -> Any:
    """The value of a column.

    Raises:
        UserError: if it is missing or of another type.
    """
    value = row.get(name)
    if not isinstance(value, kind):
        kind_of_value = "none" if name not in row else type(value).__name__
        raise UserError(f"{location}: column {name!r} must be {what}, got {kind_of_value}: fix the row")
    return value


def text_column(location: str, row: Row, name: str) -> str:
    """The non-empty text of a column.

    Raises:
        UserError: if it is missing, empty or not text.
    """
    text: str = column(location, row, name, str, "text")
    if not text.strip():
        raise UserError(f"{location}: column {name!r} must not be empty, got {text!r}: fill it or remove the row")
    return text


def number_column(location: str, row: Row, name: str) -> float:
    """The finite number of a column.

    Raises:
        UserError: if it is missing or anything else.
    """
    if not is_number(row.get(name)):
        raise UserError(f"{location}: column {name!r} must be a finite number, got {row.get(name)!r}: fix the row")
    return float(row[name])


def _messages(location: str, row: Row, column: str) -> list[Message]:
    value = row[column]
    if isinstance(value, str):
        _refuse_written_messages(location, column, value)
    if not isinstance(value, list) or not value:
        wanted = "a list of messages" if column == "messages" else "text or a list of messages"
        found = "an empty list" if value == [] else type(value).__name__
        raise UserError(f"{location}: column {column!r} must be {wanted}, got {found}: fix the row")
    place = f"{location}: column {column!r}"
    read = [read_message(place, message, with_images=True) for message in value]
    ordered = with_ordered_results(place, read)
    if awaiting_images(row, read) != awaiting_images(row, ordered):
        raise UserError(
            f"{place}: results of tools with images of the row's column must be in the order of their calls, got "
            "another: sort them"
        )
    return ordered


def _completed(location: str, row: Row, *answers: tuple[str, Any]) -> tuple[list[Message], list[list[Message]]]:
    """The prompt of a row and its completions, values of columns; see `_separated`."""
    prompt = _turns(location, row, "prompt", role="user")
    completions = [_turns(location, {name: answer}, name, role="assistant") for name, answer in answers]
    return _separated(location, [name for name, _ in answers], prompt, completions)


def _separated(
    location: str, columns: Sequence[str], prompt: list[Message], completions: Sequence[list[Message]]
) -> tuple[list[Message], list[list[Message]]]:
    """The prompt and its completions, of which any may be a conversation that repeats the prompt.

    A conversation is taken as it is, with the prompt's system turn if it has none. The beginning that conversations
    share is the prompt.

    Raises:
        UserError: if a completion may repeat the prompt or go on from it.
    """
    ends = [
        _prompt_end(f"{location}: column {name!r}", prompt, c) for name, c in zip(columns, completions, strict=True)
    ]
    whole = [(end, completion) for end, completion in zip(ends, completions, strict=True) if end]
    if not whole:
        return prompt, list(completions)
    first = whole[0][1]
    shared = whole[0][0]
    if len(whole) > 1:
        shared = min(shared_prefix(first, other) for _, other in whole[1:])
        if len(whole) == len(completions):
            shared = min(shared, min(len(completion) for _, completion in whole) - 1)
        else:
            shared = min(shared, *(end for end, _ in whole))
    if any(end > shared for end, _ in whole):
        raise UserError(
            f"{location}: columns {' and '.join(map(repr, dict.fromkeys(columns)))} must begin with the same turns up "
            "to the prompt, got different ones: change the turns or remove the row"
        )
    asked = _without_system(prompt)
    start = whole[0][0] - len(asked)
    added = {start + place: message for place, message in enumerate(asked)}
    head = [{**added.get(place, {}), **message} for place, message in enumerate(first[:shared])]
    if len(_without_system(first)) == len(first):
        head = [*prompt[: len(prompt) - len(asked)], *head]
    return head, [completion[shared:] if end else completion for end, completion in zip(ends, completions, strict=True)]


def _prompt_end(location: str, prompt: Sequence[Message], completion: Sequence[Message]) -> int:
    """The number of a completion's turns up to the end of the prompt that it repeats; 0 if it does not.

    Raises:
        UserError: if that cannot be told.
    """
    asked, said = _without_system(prompt), _without_system(completion)
    systems, repeated = prompt[: len(prompt) - len(asked)], completion[: len(completion) - len(said)]
    places = [
        place
        for place in range(len(said) - len(asked) + 1)
        if asked and all(map(_is_same, asked, said[place : place + len(asked)]))
    ]
    opens = completion[0]["role"] in ("user", *_SYSTEM_ROLES)
    goes_on = bool(said) and not repeated and prompt[-1]["role"] != "user"
    if not asked and not repeated:
        return 0
    if systems and repeated and not (len(systems) == len(repeated) and all(map(_is_same, systems, repeated))):
        places = []
    elif not asked:
        return len(repeated)
    elif opens and places:
        return len(repeated) + (0 if places[0] == 0 else places[-1]) + len(asked)
    elif not opens and not places:
        return 0
    elif goes_on and opens and not any(_is_same(said[0], message) for message in asked):
        return 0
    raise UserError(
        f"{location} must be the completion alone, or a conversation that repeats the prompt "
        f"{shortened(str(prompt[-1].get('content', '')))!r}, got turns of {', '.join(m['role'] for m in completion)} "
        "that are neither: change it, or remove the prompt or the row"
    )


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    first = next((place for place, m in enumerate(messages) if m["role"] not in _SYSTEM_ROLES), len(messages))
    return messages[first:]


def _is_same(first: Message, second: Message) -> bool:
    """Return True if two turns say the same, apart from metadata and the whitespace of turns of others than the
    assistant."""
    if first["role"] != second["role"]:
        return False
    texts = [str(message.get("content", "")) for message in (first, second)]
    if first["role"] != "assistant":
        texts = [" ".join(text.split()) for text in texts]
    calls = [[call["function"] for call in message.get("tool_calls", ())] for message in (first, second)]
    thoughts = [[message.get(key) for key in REASONING_KEYS] for message in (first, second)]
    images = [message.get(IMAGES_KEY) for message in (first, second)]
    return all(pair[0] == pair[1] for pair in (texts, calls, thoughts, images))


def shared_prefix(first: Sequence[Message], second: Sequence[Message]) -> int:
    """The number of leading turns that two conversations share."""
    shared = 0
    while shared < min(len(first), len(second)) and _is_same(first[shared], second[shared]):
        shared += 1
    return shared


def is_number(value: object) -> bool:
    """Return True if a value is a finite number: Python's JSON reader accepts NaN, which would make the loss of a batch
    NaN."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer outside the range of floats
        return False
