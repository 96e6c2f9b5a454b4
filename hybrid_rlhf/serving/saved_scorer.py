"""A saved reward model that scores conversations given as messages: for the server, `chat`, `evaluate` and the board.

A conversation is rendered and tokenized as in the reward model's training, and its score is read at the last token, as
in RL for a reward model with a separate tokenizer (rl/rewards/models.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.data.chat.conversation import encode_completion
from hybrid_rlhf.data.chat.messages import Message, Tools
from hybrid_rlhf.data.collation import padded
from hybrid_rlhf.data.images.expansion import ImageRules, RowImages
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.generation.image_loading import ModelImages
from hybrid_rlhf.models.families.vision import banned_ids, images_refused
from hybrid_rlhf.models.policy import Scorer, scores_at_end
from hybrid_rlhf.models.pretrained.folders import load_config
from hybrid_rlhf.models.pretrained.loading import load_model, require_scorer, stored_heads
from hybrid_rlhf.serving.token_text import characters, longest_token

_MOST_BATCH_TOKENS = 8192
"""Largest number of tokens of a forward, unless a single conversation is longer."""


class NotWanted(Exception):
    """No caller waits for the scores any more."""


def _always() -> bool:
    return True


@dataclass(frozen=True)
class ScoredRow:
    """A conversation as the model reads it."""

    ids: list[int]
    images: Sequence[ImageReference] = ()

    def __len__(self) -> int:
        return len(self.ids)


class SavedScorer:
    """A reward model and its tokenizer."""

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        max_image_pixels: int = 2**20,
    ) -> None:
        """Load the model; `name` is its name in errors, and images are scaled down to `max_image_pixels`.

        Raises:
            UserError: when it is not a reward model.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        require_scorer(config, name)
        settings = ModelConfig(path=path, trust_remote_code=trust_remote_code)
        lm, _ = load_model(path, "scorer", config=settings, dtype=dtype, heads=None)
        self.name = name
        self.tokenizer = tokenizer
        self.device = device
        self.heads = stored_heads(config)
        """Names of its scores; empty for a single score."""
        self.model = Scorer(lm.to(device).eval())  # type: ignore[arg-type]
        self.reads_images = images_refused(lm.config) is None
        """True if conversations may have images."""
        self._banned = frozenset(banned_ids(lm.config))
        self._images = ModelImages(path, trust_remote_code=trust_remote_code)
        self._max_image_pixels = max_image_pixels
        self._limit: int | None = getattr(lm.config, "max_position_embeddings", None)
        self._is_wanted: Callable[[], bool] = _always
        for layers in [module for module in self.model.modules() if isinstance(module, ModuleList)]:
            for layer in layers:
                layer.register_forward_pre_hook(self._stop_unwanted)

    def read_images(self, location: str, sources: Sequence[Any]) -> RowImages | None:
        """The images of a conversation, in the order of their marks; arguments as of `ImageRules.references`.

        Raises:
            UserError: for an image that cannot be read, or a model that reads none.
        """
        if not sources:
            return None
        layout = self._images.loader.processor
        return RowImages(layout, ImageRules(max_pixels=self._max_image_pixels).references(location, sources))

    def encode(
        self,
        prompt: list[Message],
        completion: list[Message],
        *,
        tools: Tools | None = None,
        images: RowImages | None = None,
        shown: str,
    ) -> ScoredRow:
        """The tokens of a conversation; `shown` is its name in errors.

        Raises:
            UserError: when it cannot be rendered, or is longer than the model reads.
        """
        if self._limit is not None:
            count = characters([*prompt, *completion])
            if count > self._limit * longest_token(self.tokenizer):
                raise UserError(f"{shown} must have at most {self._limit} tokens, got {count} characters: shorten it")
        ids = encode_completion(prompt, completion, self.tokenizer, tools=tools, images=images).input_ids
        if self._limit is not None and len(ids) > self._limit:
            raise UserError(f"{shown} must have at most {self._limit} tokens, got {len(ids)}: shorten it")
        if images is None and not self._banned.isdisjoint(ids):
            raise UserError(f"{shown} must not have tokens that stand for images: send the images, or remove them")
        return ScoredRow(ids, () if images is None else images.references)

    @torch.no_grad()
    def scores(self, rows: Sequence[ScoredRow], is_wanted: Callable[[], bool] = _always) -> Tensor:
        """Scores [n] float32 of rows in one forward, or [n, heads] of a model with several heads.

        Args:
            rows: the conversations.
            is_wanted: called before each layer, whose forward may take seconds on a CPU; false stops the forward.

        Raises:
            NotWanted: when they are not wanted any more.
        """
        self._is_wanted = is_wanted
        ids, mask = padded([row.ids for row in rows], 0)
        images = None
        if any(row.images for row in rows):
            images = self._images.loader.images([row.images for row in rows], self._images.cache)
        return scores_at_end(self.model(ids, mask, images=images, device=self.device), mask).cpu()

    def _stop_unwanted(self, *_: object) -> None:
        if not self._is_wanted():
            raise NotWanted

    def score(
        self, conversations: Sequence[tuple[list[Message], str, Tools | None, RowImages | None]]
    ) -> list[list[float]]:
        """One score per head, after the last token of each conversation.

        Args:
            conversations: prompts, completions, the tools that the assistant may call, and the images of prompts.

        Raises:
            UserError: see `encode`.
        """
        rows = [
            self.encode(
                prompt,
                [{"role": "assistant", "content": text}],
                tools=tools,
                images=images,
                shown="a scored conversation",
            )
            for prompt, text, tools, images in conversations
        ]
        scores: dict[int, list[float]] = {}
        for places in batches(rows):
            batch_scores = self.scores([rows[place] for place in places])
            scores |= zip(places, batch_scores.view(len(places), -1).tolist(), strict=True)
        return [scores[place] for place in range(len(rows))]


def batches(rows: Sequence[ScoredRow]) -> list[list[int]]:
    """Indices of rows for each forward: rows of similar lengths, and few tokens."""
    groups: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda place: -len(rows[place])):
        if not groups or (len(groups[-1]) + 1) * len(rows[groups[-1][0]]) > _MOST_BATCH_TOKENS:
            groups.append([])
        groups[-1].append(place)
    return groups
