"""An observation as the tokens that follow a turn of the actor: a turn of the tool, up to where the actor speaks again.

Rendered by the chat template behind a stand-in of the actor's turn, whose own tokens stay as they were sampled. A
template that cannot show the role `tool` shows observations as turns of the user.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.template import render

_ROLES = ("tool", "user")
_STAND_IN, _PROBE = "q7turnq7", "q7toldq7"


class Turns:
    """Renders observations for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_observation_tokens: int) -> None:
        """Find the role that the template shows.

        Raises:
            UserError: when it shows none.
        """
        self._tokenizer, self._longest = tokenizer, max_observation_tokens
        self._role = next((role for role in _ROLES if self._shows(role)), None)
        if self._role is None:
            raise UserError(
                "an environment needs a chat template that shows a tool's or a user's turn behind the assistant's, "
                "this one shows neither: give the tokenizer another"
            )

    def observation_ids(self, observation: str, *, end_token: int | None) -> list[int]:
        """Tokens of an observation after a turn that a token has ended, which is not repeated, or that was cut."""
        ids = self._ids(observation)
        if len(ids) > self._longest:
            observation = str(self._tokenizer.decode(ids[: self._longest]))
        assert self._role is not None
        rest = self._after_turn(self._role, observation)
        closed = self._ids(rest.lstrip())
        return closed[1:] if closed[:1] == [end_token] else self._ids(rest)

    def _shows(self, role: str) -> bool:
        try:
            return _PROBE in self._after_turn(role, _PROBE)
        except UserError:
            return False

    def _after_turn(self, role: str, observation: str) -> str:
        messages = [("user", "."), ("assistant", _STAND_IN), (role, observation)]
        text = render(
            [{"role": who, "content": said} for who, said in messages], self._tokenizer, add_generation_prompt=True
        )
        return text.partition(_STAND_IN)[2]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
