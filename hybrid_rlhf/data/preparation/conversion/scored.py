"""Comparisons of completions: UltraFeedback, HelpSteer2 and 3, Nectar, and those of OpenAI for summaries and for
WebGPT.

UltraFeedback (Cui et al. 2023, arXiv 2310.01377): `instruction` and `completions` with `overall_score`, or
`fine-grained_score`, or ratings in `annotations`, of which the mean counts. Summaries (Stiennon et al. 2020, arXiv
2009.01325): `info`, two `summaries` and `choice`; the prompt is written as in their code, ending in "TL;DR:". WebGPT
(Nakano et al. 2021, arXiv 2112.09332): `question`, `answer_0`, `answer_1`, `score_0` and `score_1`.

HelpSteer2 (Wang et al. 2024, arXiv 2406.08673): `prompt` and `response` with `helpfulness`, by which the answers to a
prompt are ranked, or `response_1`, `response_2` and `preference_strength`. HelpSteer3 (arXiv 2505.11475): `context`,
`response1`, `response2` and `overall_preference`. Both preferences are negative if the first answer is better. Nectar
(Zhu et al. 2023): `prompt`, a dialogue as in HH-RLHF that ends with `Assistant:`, and `answers` with `rank`, 1 for the
best.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from hybrid_rlhf.configs.commands.data import RankedAs
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message, read_message
from hybrid_rlhf.data.preparation.conversion.dialogues import dialogue_turns
from hybrid_rlhf.data.preparation.conversion.records import (
    LocatedRow,
    RankedCompletions,
    Record,
    pair_row,
)
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import column, is_number, number_column, text_column
from hybrid_rlhf.data.rows.problems import RowProblems
from hybrid_rlhf.runtime.observability.logs import shortened

_SCORES = ("overall_score", "fine-grained_score")
_STEER_SPEAKER = re.compile(r"\n?<extra_id_1>(User|Assistant)\n?")
_POST_FIELDS = ("subreddit", "title", "post")


def ultrafeedback_row(location: str, row: Row) -> RankedCompletions:
    """The completions, ranked by their scores; equal scores have equal ranks."""
    prompt = text_column(location, row, "instruction")
    completions = column(location, row, "completions", list, "a list of completions")
    if not completions:
        raise UserError(f"{location}: column 'completions' must have completions, got none: remove the row")
    objects = _objects(location, "completion", completions)
    return _ranked(_user(prompt), [(text_column(place, one, "response"), _score(place, one)) for place, one in objects])


def _score(place: str, completion: Row) -> float:
    for name in _SCORES:
        if is_number(completion.get(name)):
            return float(completion[name])
    annotations = completion.get("annotations")
    ratings = [_rating(aspect) for aspect in annotations.values()] if isinstance(annotations, dict) else []
    present = [rating for rating in ratings if rating is not None]
    if not present:
        raise UserError(
            f"{place} must have a score ({', '.join(_SCORES)}, or ratings in annotations), got none: remove it"
        )
    return fmean(present)


def _rating(aspect: Any) -> float | None:
    """The rating of an aspect, a number or its text; None for "N/A"."""
    text = str(aspect.get("Rating")) if isinstance(aspect, dict) else ""
    return float(text) if text.replace(".", "", 1).isdecimal() else None


def comparison_row(location: str, row: Row) -> Row:
    """The pair of a comparison."""
    if "summaries" in row:
        return _summaries(location, row)
    question = column(location, row, "question", dict, "an object with 'full_text'")
    prompt = text_column(f"{location}: column 'question'", question, "full_text")
    answers = [text_column(location, row, name) for name in ("answer_0", "answer_1")]
    scores: list[Any] = [row.get("score_0"), row.get("score_1")]
    if not all(is_number(score) for score in scores) or scores[0] == scores[1]:
        raise UserError(f"{location}: a comparison needs two different scores, got {scores}: remove the row")
    return _chosen(_user(prompt), answers, int(scores[0] < scores[1]))


def _summaries(location: str, row: Row) -> Row:
    info = column(location, row, "info", dict, "an object with 'post' or 'article'")
    if info.get("article"):
        prompt = f"Article:\n\n{info['article']}\n\nTL;DR:"
    else:
        subreddit, title, post = (text_column(f"{location}: column 'info'", info, name) for name in _POST_FIELDS)
        prompt = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    summaries = column(location, row, "summaries", list, "a list of two summaries")
    choice = row["choice"]
    if len(summaries) != 2 or not all(isinstance(summary, dict) for summary in summaries) or choice not in (0, 1):
        raise UserError(
            f"{location}: a comparison needs two summaries and a choice of 0 or 1, got {len(summaries)} and "
            f"{choice!r}: fix or remove the row"
        )
    texts = [text_column(f"{location}: column 'summaries'", summary, "text").strip() for summary in summaries]
    return _chosen(_user(prompt), texts, int(choice))


def _chosen(prompt: list[Message], texts: list[str], index: int) -> Row:
    return pair_row(prompt, [_assistant(texts[index])], [_assistant(texts[1 - index])])


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def helpsteer2_records(rows: Iterable[LocatedRow], _: RankedAs, problems: RowProblems) -> Iterator[tuple[str, Record]]:
    """The answers to each prompt, each in a row with its ratings, ranked by helpfulness; or the pairs of rows."""
    rated: dict[str, list[tuple[str, float]]] = {}
    locations: dict[str, str] = {}
    for location, row in rows:
        with problems.collected():
            prompt = text_column(location, row, "prompt")
            if "preference_strength" in row:
                answers = [text_column(location, row, name) for name in ("response_1", "response_2")]
                turns = _turns_of(location, prompt)
                yield location, _preferred(location, row, "preference_strength", turns, answers)
            else:
                answer = (text_column(location, row, "response"), number_column(location, row, "helpfulness"))
                rated.setdefault(prompt, []).append(answer)
                locations.setdefault(prompt, location)
    for prompt, answers_of_prompt in rated.items():
        with problems.collected():
            yield locations[prompt], _ranked(_turns_of(locations[prompt], prompt), answers_of_prompt)


def helpsteer3_row(location: str, row: Row) -> Row:
    """The pair of a row."""
    context = column(location, row, "context", list, "a list of messages")
    prompt = [read_message(f"{location}: column 'context'", message) for message in context]
    answers = [text_column(location, row, name) for name in ("response1", "response2")]
    return _preferred(location, row, "overall_preference", prompt, answers)


def nectar_row(location: str, row: Row) -> RankedCompletions:
    """The ranked answers of a row."""
    prompt = dialogue_turns(location, row, "prompt", ends_open=True)
    answers = column(location, row, "answers", list, "a list of answers with ranks")
    if not answers:
        raise UserError(f"{location}: column 'answers' must have an answer, got none: remove the row")
    ranked = [
        (_assistant(text_column(place, answer, "answer").strip()), number_column(place, answer, "rank"))
        for place, answer in _objects(location, "answer", answers)
    ]
    return RankedCompletions(prompt, [turn for turn, _ in ranked], [rank for _, rank in ranked])


def _objects(location: str, name: str, values: list[Any]) -> Iterator[tuple[str, Row]]:
    """Yield the place and the value of each of a row's objects."""
    for number, value in enumerate(values, start=1):
        place = f"{location}: {name} {number}"
        if not isinstance(value, dict):
            raise UserError(f"{place} must be an object, got {type(value).__name__}: fix the row")
        yield place, value


def _preferred(location: str, row: Row, name: str, prompt: list[Message], answers: list[str]) -> Row:
    """The pair of two answers, of which a negative preference means the first."""
    preference = number_column(location, row, name)
    if preference == 0:
        raise UserError(f"{location}: a pair needs a preference, got column {name!r} 0: remove the row")
    return _chosen(prompt, answers, int(preference > 0))


def _turns_of(location: str, prompt: str) -> list[Message]:
    """The turns of a prompt of HelpSteer2, which marks those after the first by the names of their speakers."""
    first, *rest = _STEER_SPEAKER.split(prompt)
    turns = [(speaker.lower(), text) for speaker, text in zip(rest[::2], rest[1::2], strict=True)]
    if first.strip():
        turns.insert(0, ("user", first))
    if turns and turns[-1][0] == "assistant" and not turns[-1][1].strip():
        turns.pop()
    messages = [{"role": role, "content": text.strip()} for role, text in turns]
    if not messages or messages[-1]["role"] != "user":
        raise UserError(
            f"{location}: column 'prompt' must end with a turn of the user, got {shortened(prompt)!r}: remove the row"
        )
    return [read_message(f"{location}: column 'prompt'", message) for message in messages]


def _ranked(prompt: list[Message], scored: Sequence[tuple[str, float]]) -> RankedCompletions:
    """Completions ranked by their scores, the highest first; equal scores have equal ranks."""
    order = sorted({score for _, score in scored}, reverse=True)
    ranks = [1.0 + order.index(score) for _, score in scored]
    return RankedCompletions(prompt, [_assistant(text) for text, _ in scored], ranks)
