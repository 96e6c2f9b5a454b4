"""Reward functions of verl and OpenRLHF, known by their parameters and called as there.

verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, once per completion, returns a number or a
mapping with `score` (verl 0.9.1, workers/reward_manager/naive.py). OpenRLHF: `reward_func(queries, prompts, labels)`,
returns a tensor or a mapping with `rewards` (OpenRLHF 0.11.2, utils/agent.py). Deviation: the prompt of a query is the
text of its turns, not the rendered chat template.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_rlhf.data.chat.messages import Message

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_OPENRLHF = ("queries", "prompts", "labels")


def as_reward(function: Callable[..., Any]) -> tuple[Callable[..., Any], str] | None:
    """A reward function of this project that calls one of another system, and the system; None for other functions."""
    given = inspect.signature(function).parameters
    if {"solution_str", "ground_truth"} <= given.keys():
        return _of_verl(function, [name for name in _VERL if name in given]), "verl"
    if {"queries", "prompts"} <= given.keys():
        return _of_openrlhf(function, [name for name in _OPENRLHF if name in given]), "OpenRLHF"
    return None


def _of_verl(function: Callable[..., Any], wanted: Sequence[str]) -> Callable[..., Any]:
    async def compute_scores(
        prompts: object, completions: Sequence[str], ground_truth: Sequence[object], **columns: Sequence[object]
    ) -> list[Any]:
        async def score(place: int) -> Any:
            row = {"data_source": "", "extra_info": None} | {name: values[place] for name, values in columns.items()}
            row |= {"solution_str": completions[place], "ground_truth": ground_truth[place]}
            result = function(**{name: row[name] for name in wanted})
            result = await result if inspect.isawaitable(result) else result
            return result["score"] if isinstance(result, Mapping) else result

        return list(await asyncio.gather(*map(score, range(len(completions)))))

    return compute_scores


def openrlhf_arguments(
    prompts: Sequence[Sequence[Message]], completions: Sequence[str], columns: Mapping[str, Sequence[object]]
) -> dict[str, list[Any]]:
    """Arguments of a reward of OpenRLHF: texts of prompts, with completions, and the column label, labels or answer."""
    texts = ["\n".join(str(turn.get("content") or "") for turn in turns) for turns in prompts]
    labels = next((columns[name] for name in ("label", "labels", "answer") if name in columns), [None] * len(texts))
    queries = [text + completion for text, completion in zip(texts, completions, strict=True)]
    return {"queries": queries, "prompts": texts, "labels": list(labels)}


def _of_openrlhf(function: Callable[..., Any], wanted: Sequence[str]) -> Callable[..., Any]:
    def rewards(prompts: Sequence[Sequence[Message]], completions: Sequence[str], **columns: Sequence[object]) -> Any:
        given = openrlhf_arguments(prompts, completions, columns)
        result = function(**{name: given[name] for name in wanted})
        return result["rewards"] if isinstance(result, Mapping) else result

    return rewards
