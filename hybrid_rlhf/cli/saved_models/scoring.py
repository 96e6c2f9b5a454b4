"""A saved reward model that scores conversations given as text, for `chat` and `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from hybrid_rlhf.cli.saved_models.loading import Place
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.data.chat.conversation import encode_completion
from hybrid_rlhf.data.chat.messages import Message, Tools
from hybrid_rlhf.models.policy import Scorer, scores_at_end
from hybrid_rlhf.models.pretrained.folders import load_config
from hybrid_rlhf.models.pretrained.loading import is_scorer, load_model, position_limit, stored_heads


class SavedScorer:
    """A reward model and its tokenizer."""

    def __init__(self, place: Place) -> None:
        """Load it.

        Raises:
            UserError: when it is no reward model.
        """
        config = load_config(place.path, trust_remote_code=place.trust_remote_code)
        if not is_scorer(config):
            raise UserError(
                f"a reward model must have a score head, {place.name} has none: give one that the reward step saved"
            )
        self.tokenizer = place.tokenizer
        self.heads = stored_heads(config)
        """Names of its scores; empty for a single one."""
        lm, _ = load_model(
            place.path,
            "scorer",
            config=ModelConfig(path=place.path, trust_remote_code=place.trust_remote_code),
            dtype=place.dtype,
            heads=None,
        )
        self.model = Scorer(lm.to(place.device).eval())  # type: ignore[arg-type]
        self.device = place.device
        self._limit = position_limit(lm)

    @torch.no_grad()
    def score(
        self, conversations: Sequence[tuple[list[Message], str, Tools | None]], *, batch_rows: int = 8
    ) -> list[list[float]]:
        """One score per head, after the last token of each conversation.

        Args:
            conversations: prompts, completions, and the tools that the assistant may call.
            batch_rows: conversations in one forward pass.

        Raises:
            UserError: when a conversation cannot be rendered, or is longer than the model reads.
        """
        rows = [
            encode_completion(prompt, [{"role": "assistant", "content": text}], self.tokenizer, tools=tools).input_ids
            for prompt, text, tools in conversations
        ]
        longest = max(map(len, rows), default=0)
        if self._limit is not None and longest > self._limit:
            raise UserError(
                f"the reward model has {self._limit} positions, a conversation has {longest} tokens: shorten it"
            )
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        scores: dict[int, list[float]] = {}
        for start in range(0, len(order), batch_rows):
            places = order[start : start + batch_rows]
            ids = pad_sequence([torch.tensor(rows[place]) for place in places], batch_first=True).to(self.device)
            lengths = torch.tensor([len(rows[place]) for place in places], device=self.device)
            mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
            found = scores_at_end(self.model(ids, mask), mask)
            scores |= zip(places, found.view(len(places), -1).tolist(), strict=True)
        return [scores[place] for place in range(len(rows))]
