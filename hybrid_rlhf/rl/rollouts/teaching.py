"""The teachers of on-policy distillation: which one reads each completion, after which prompt, and what it reports.

A row has one teacher, by a column of its data (MOPD, arXiv 2601.02780). A template of the prompt lets the teacher see
what the actor does not, so that a model can teach itself (SDFT, arXiv 2601.19897; OPSD, 2601.18734; SDPO, 2601.20802);
what it computes is then moved to the tokens of the actor's row.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import TeacherConfig
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.models.policy import TopTokens
from hybrid_rlhf.rl.rewards.components import read_prompt
from hybrid_rlhf.rl.roles.roles import Roles
from hybrid_rlhf.rl.rollouts.served_teacher import ServedTeacher
from hybrid_rlhf.rl.types import Rollout, TeacherPrompts


class Teaching:
    """The teachers of a run."""

    def __init__(self, config: TeacherConfig, roles: Roles, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the settings, the models and the tokenizer of all of them."""
        self.config = config
        self._tokenizer = tokenizer
        self.models: list[RoleModel] = [*roles.teachers.values()]
        """The teachers by number."""
        paths = [*config.models.values()]
        numbers: dict[str | None, int] = {path: number for number, path in enumerate(paths or [config.url])}
        if config.path is config.url is None and config.prompt_template is not None:
            numbers[None] = len(self.models)
            self.models.append(roles.actor)
        self._number_of = {value: numbers[path] for value, path in config.per_source.items()}
        self._default = numbers.get(config.path or config.url)
        self.top = TopTokens(min(config.top_k, len(tokenizer)), len(tokenizer)) if config.top_k else None
        """The likely tokens that teachers report; None: none."""
        self.served = None if config.url is None else ServedTeacher(config, k=0 if self.top is None else self.top.k)

    def assigned(self, prompts: Sequence[Mapping[str, Any]], rollout: Rollout) -> Rollout:
        """The rollout with the teacher of each row, and the prompt that it reads.

        Args:
            prompts: rows of `load_prompt_data`.
            rollout: rows with the places of their prompts in `groups`.
        """
        places = rollout.groups.tolist()
        columns = functools.cache(lambda place: json.loads(prompts[place]["columns"]))
        if self.config.per_source:
            numbers = [self._number(columns(place)) for place in places]
            rollout = replace(rollout, teachers=torch.tensor(numbers, dtype=torch.long))
        if self.config.prompt_template is None:
            return rollout
        asked = {place: self._conversation(prompts[place], columns(place)) for place in {*places}}
        ids_of = {
            place: encode_prompt(messages, self._tokenizer, tools=columns(place).get("tools"))
            for place, messages in asked.items()
        }
        found = [ids_of[place] for place in places]
        ids = torch.tensor([token for of_row in found for token in of_row], dtype=torch.long)
        return replace(rollout, teacher_prompts=TeacherPrompts(ids, torch.tensor([*map(len, found)], dtype=torch.long)))

    def require_usable(self, *data: Iterable[Mapping[str, Any]], longest: int) -> None:
        """Raise UserError for a server that cannot be the teacher of rows of `longest` tokens, and for prompts without
        a teacher or without a column of the template."""
        if self.served is not None:
            self.served.require_same(self._tokenizer, longest=longest)
        for row in chain.from_iterable(data):
            columns = json.loads(row["columns"])
            self._number(columns)
            if self.config.prompt_template is not None:
                self._conversation(row, columns)

    def split(self, found: Tensor, rollout: Rollout) -> dict[str, Tensor]:
        """The columns of a rollout from what its teachers have found, [n, T', 1 + 2 k] of the rows as taught."""
        k = 0 if self.top is None else self.top.k
        found = found.view(len(rollout), found.shape[1], 1 + 2 * k)
        moved = found
        if rollout.teacher_prompts is not None:
            moved = found.new_zeros(*rollout.input_ids.shape, 1 + 2 * k)
            ends = zip(rollout.begins, rollout.lengths.tolist(), rollout.teacher_prompts.lengths.tolist(), strict=True)
            for row, (begin, length, taught) in enumerate(ends):
                moved[row, begin:length] = found[row, taught : taught + length - begin]
        columns = {"teacher_logprobs": moved[..., 0].contiguous()}
        if k:
            columns |= {"teacher_top": moved[..., 1 : 1 + k].contiguous(), "teacher_tokens": moved[..., 1 + k :].int()}
        return columns

    def _number(self, columns: Mapping[str, Any]) -> int:
        """Number of the teacher of a row."""
        column = self.config.source_column
        value = columns.get(column)
        number = self._number_of.get(str(value), self._default)
        if number is None:
            found, fix = (
                ("without it", "name the column by teacher.source_column, or give teacher.path")
                if value is None
                else (f"with {str(value)!r}", "add it")
            )
            raise UserError(
                f"teacher.per_source must have each value of column {column!r} unless teacher.path has the others, got "
                f"a row {found}: {fix}"
            )
        return number

    def _conversation(self, row: Mapping[str, Any], columns: Mapping[str, Any]) -> list[Any]:
        """The conversation that the teacher reads before the completion."""
        messages = read_prompt(row)
        last = max((turn for turn, message in enumerate(messages) if message["role"] == "user"), default=None)
        template = self.config.prompt_template
        if last is None or template is None:
            raise UserError("teacher.prompt_template replaces the last user turn, got a prompt without: leave it out")
        try:
            text = template.format_map({**columns, "prompt": messages[last]["content"]})
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(
                f"teacher.prompt_template must have {{prompt}} and columns of the rows in braces, got {error} with the "
                f"columns {', '.join(columns) or 'none'}: fix the template or the row"
            ) from error
        return [*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :]]
