"""Tokens of an observation: a tool turn after a turn of the actor, up to the actor's next turn.

The chat template renders the observation after a placeholder for the actor's turn, whose tokens stay as sampled. If the
template does not support the role `tool`, or not with images, observations are user turns.
"""

from __future__ import annotations

import contextlib

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.chat.template import ChatTemplate, render
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, RowImages

_ROLES = ("tool", "user")
PLACEHOLDER = "q7turnq7"
"""Stands for a turn of the actor in a rendered conversation."""
TRUNCATED = "\n[truncated]\n"
"""Stands for the middle of an observation that is too long."""
_PART = "\ufffd"
"""Stands for bytes of a character that a cut divides."""
_PROBE = "q7toldq7"


class ObservationEncoder:
    """Renders observations for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_observation_tokens: int) -> None:
        """Choose the first role that the template renders.

        Raises:
            UserError: when the template renders no role for observations, or the limit has no room for `TRUNCATED`.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_observation_tokens
        self._max_cut_tokens = max_observation_tokens - len(self._ids(TRUNCATED))
        require(
            self._max_cut_tokens >= 0,
            f"environment.max_observation_tokens must have room for {TRUNCATED.strip()} in a longer observation, "
            f"got {max_observation_tokens}: give {max_observation_tokens - self._max_cut_tokens} or more",
        )
        role = self._first_role(_PROBE)
        if role is None:
            raise UserError(
                "an environment needs a chat template that shows a tool's or a user's turn after the assistant's, "
                "the tokenizer's shows neither: set data.chat_template to another"
            )
        self._role = role
        self._image_role = self._first_role(IMAGE_MARK + _PROBE) or role

    def fitting(self, observation: str) -> str:
        """The text of an observation with max_observation_tokens, of which images have none: `TRUNCATED` is in place of
        the middle of a longer one, because tools say at the end why they failed. Marks of images stay."""
        parts = observation.split(IMAGE_MARK)
        ids = list(map(self._ids, parts))
        total = sum(map(len, ids))
        if total <= self._max_tokens:
            return observation
        end, rest = -(-self._max_cut_tokens // 2), total - self._max_cut_tokens // 2
        begin = 0
        for place, own in enumerate(ids):
            kept = own[: max(0, end - begin)], own[max(0, rest - begin) :]
            first, last = (str(self._tokenizer.decode(of)).strip(_PART) for of in kept)
            if begin <= end < begin + len(own):
                parts[place] = first + TRUNCATED + last
            elif end < begin:
                parts[place] = last
            begin += len(own)
        return IMAGE_MARK.join(parts)

    def observation_ids(self, observation: str, *, end_token: int | None, images: RowImages | None = None) -> list[int]:
        """Tokens of an observation.

        Args:
            observation: the text, with marks of images, as `fitting` returns it.
            end_token: stop token that ended the actor's turn; None if the turn was truncated.
            images: those of the marks; None for a model that reads none.

        Raises:
            UserError: if the template rejects the observation, or the text has a token that stands for an image.
        """
        rest = self._after_turn(self._image_role if IMAGE_MARK in observation else self._role, observation)
        if images is None:
            return ids_after_turn(rest, self._tokenizer, end_token=end_token)
        ids = ids_after_turn(images.expanded([rest])[0], self._tokenizer, end_token=end_token)
        images.require_no_others(ids, len(images.references), self._tokenizer)
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _first_role(self, content: str) -> str | None:
        """The first role whose turn the template renders with a content."""
        for role in _ROLES:
            with contextlib.suppress(UserError):
                if _PROBE in self._after_turn(role, content):
                    return role
        return None

    def _after_turn(self, role: str, observation: str) -> str:
        messages = [("user", "."), ("assistant", PLACEHOLDER), (role, observation)]
        conversation = [{"role": speaker, "content": content} for speaker, content in messages]
        text = render(conversation, self._tokenizer, add_generation_prompt=True)
        return text.partition(PLACEHOLDER)[2]


def ids_after_turn(text: str, tokenizer: PreTrainedTokenizerBase, *, end_token: int | None) -> list[int]:
    """Tokens that a chat template writes after the text of a turn of the actor.

    Args:
        text: from the end of the turn's text.
        tokenizer: tokenizer of the template.
        end_token: stop token that ended the turn, after which the template's own end token is left out; None if the
            turn was truncated.
    """
    whole, closed = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (text, text.lstrip()))
    if end_token is None or not closed:
        return whole
    return closed[1:] if closed[0] == end_token or _begins_with_an_end(text.lstrip(), tokenizer) else whole


def _begins_with_an_end(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a special token at the start of a text ends the turn before it, rather than opens the next one.

    The token may differ from the one that ends a final turn: gpt-oss samples `<|return|>` and reads `<|end|>`.
    """
    template = ChatTemplate.of(tokenizer)
    if template is None or template.special.match((template.turn_suffix or "").lstrip()) is None:
        return False
    user: list[Message] = [{"role": "user", "content": "."}]
    asked, opened = (template.render(user, add_generation_prompt=opens) for opens in (False, True))
    opening = template.special.match(opened.removeprefix(asked).lstrip())
    token = template.special.match(text)
    return token is not None and (opening is None or token[0] != opening[0])
