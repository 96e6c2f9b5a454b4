"""Comparisons of completions: UltraFeedback, and those of OpenAI for summaries and for WebGPT.

UltraFeedback (Cui et al. 2023, arXiv 2310.01377): `instruction` and `completions` with `overall_score`, or
`fine-grained_score`, or ratings in `annotations`, of which the mean counts. Summaries (Stiennon et al. 2020, arXiv
2009.01325): `info`, two `summaries` and `choice`; the prompt is written as in their code, ending in "TL;DR:". WebGPT
(Nakano et al. 2021, arXiv 2112.09332): `question`, `answer_0`, `answer_1`, `score_0` and `score_1`.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.preparation.conversion.records import RankedCompletions, column, pair_row, text_column
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import is_number

_SCORES = ("overall_score", "fine-grained_score")
_POST_FIELDS = ("subreddit", "title", "post")


def ultrafeedback_row(location: str, row: Row) -> RankedCompletions:
    """The completions, ranked by their scores; equal scores have equal ranks."""
    prompt = text_column(location, row, "instruction")
    completions = column(location, row, "completions", list, "a list of completions")
    if not completions:
        raise UserError(f"{location}: column 'completions' must have completions, got none: remove the row")
    texts = []
    scores = []
    for number, completion in enumerate(completions, start=1):
        place = f"{location}: completion {number}"
        if not isinstance(completion, dict):
            raise UserError(f"{place} must be an object, got {type(completion).__name__}: fix the row")
        texts.append(text_column(place, completion, "response"))
        scores.append(_score(place, completion))
    order = sorted(set(scores), reverse=True)
    return RankedCompletions(
        _user(prompt), [_assistant(text) for text in texts], [1.0 + order.index(score) for score in scores]
    )


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
    scores = [row.get("score_0"), row.get("score_1")]
    if not all(is_number(score) for score in scores) or scores[0] == scores[1]:
        raise UserError(f"{location}: a comparison needs two different scores, got {scores}: remove the row")
    return _chosen(prompt, answers, 0 if float(scores[0] or 0) > float(scores[1] or 0) else 1)


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
    return _chosen(prompt, texts, int(choice))


def _chosen(prompt: str, texts: list[str], index: int) -> Row:
    return pair_row(_user(prompt), [_assistant(texts[index])], [_assistant(texts[1 - index])])


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
