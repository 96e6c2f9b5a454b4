"""Reward models as components: one class reads the actor's tokens, the other tokenizes the text again.

A model with another chat template or vocabulary cannot score the actor's tokens. Completions are then decoded, the
conversation is rendered with the model's template, and the score is read at the last token. All heads of a model are
computed in one forward and summed with the component's weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.data.chat.conversation import encode_completion
from hybrid_rlhf.data.chat.messages import Message, Tools
from hybrid_rlhf.data.collation import padded
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.data.rows.stepwise import SEPARATOR_KEY, StepwiseTokens, encode_steps
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.models.policy import scores_at_end
from hybrid_rlhf.models.pretrained.loading import stored_heads
from hybrid_rlhf.rl.rewards.components import ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.types import Rollout


class ScoreTransform:
    """Standardizes the scores of a model and reduces its heads to one number per row."""

    def __init__(self, component: RewardComponentConfig, config: PreTrainedConfig) -> None:
        """Take the component and the model's config.

        Raises:
            UserError: when the model lacks a head or the calibration that the component requires.
        """
        heads = stored_heads(config)
        unknown = sorted(set(component.head_weights) - set(heads))
        if unknown:
            raise UserError(
                f"reward.components: head_weights of {component.label} must name scores of the model "
                f"({', '.join(heads) or 'it has one'}), got {unknown[0]}: "
                f"{'name one of them' if heads else 'leave it out'}"
            )
        self._weights = [component.head_weights.get(name, 0.0 if component.head_weights else 1.0) for name in heads]
        self._mean = [0.0]
        self._std = [1.0]
        if component.normalize:
            self._mean, self._std = (
                _calibrated(component, config, name, max(len(heads), 1)) for name in ("mean", "std")
            )

    def __call__(self, scores: Tensor) -> Tensor:
        """[n] component scores of model scores [n] or [n, heads]."""
        mean, std = (torch.tensor(value, device=scores.device) for value in (self._mean, self._std))
        scores = (scores - mean) / std.clamp(min=1e-6)  # [n] with [1], or [n, heads] with [heads]
        return scores if scores.dim() == 1 else scores @ torch.tensor(self._weights, device=scores.device)


class _PresentModel(RewardComponent):
    """A reward model on a rank that has it."""

    in_background = False

    def __init__(self, config: RewardComponentConfig, engine: RoleModel) -> None:
        super().__init__(config)
        self._engine = engine
        self._transform = ScoreTransform(config, engine.config)
        self.packs = engine.packs
        self.shares_prefixes = engine.shares_prefixes
        self.world = engine.world

    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Return a call that runs the forwards, on this rank's rows."""
        return lambda: self._score(batch)

    @abstractmethod
    def _score(self, batch: RewardBatch) -> ComponentScores:
        """Scores of this rank's rows."""

    def _values(self, batch: RewardBatch, read: Callable[[Sequence[int | None]], Tensor]) -> list[float]:
        """One number per row, from the model's scores of each micro-batch: `read(indices)`, [n] or [n, heads]."""
        with self._engine.on_device():
            scores = [read(indices) for indices in batch.micro_batches]
        values = self._transform(torch.cat(scores)).tolist()
        return [
            value
            for index, value in zip(chain.from_iterable(batch.micro_batches), values, strict=True)
            if index is not None
        ]


class ModelReward(_PresentModel):
    """A reward model that reads the actor's tokens."""

    reads_text = False
    logged_alone = False

    def __init__(
        self, config: RewardComponentConfig, engine: RoleModel, *, end: tuple[int, Sequence[int]] | None = None
    ) -> None:
        """Take the model, and the end of a turn with the tokens after it, where the model was trained to score
        (data/chat/conversation.py, turn_end)."""
        super().__init__(config, engine)
        self._end = end

    def _score(self, batch: RewardBatch) -> ComponentScores:
        def read(indices: Sequence[int | None]) -> Tensor:
            rows = batch.rows(indices)
            return self._read(rows, batch.images_of(rows))

        values = self._values(batch, read)
        return ComponentScores.read(values, len(values))

    def _read(self, batch: Rollout, images: list[list[ImageReference]] | None) -> Tensor:
        """Scores of a micro-batch; rows that end with the end of a turn get the tokens after it, if the model has the
        positions."""
        last, tail = self._end or (-1, ())
        ids, mask = (pad(tokens, (0, len(tail))) for tokens in (batch.input_ids, batch.attention_mask))
        lengths = batch.lengths[:, None]
        limit = getattr(self._engine.config, "max_position_embeddings", None)
        ended = ids.gather(1, lengths - 1) == last
        if limit is not None:
            ended &= lengths + len(tail) <= limit
        ended = ended[:, 0].nonzero()
        places = lengths[ended[:, 0]] + torch.arange(len(tail), device=ids.device)
        ids[ended, places] = torch.tensor(tail, dtype=ids.dtype, device=ids.device)
        mask[ended, places] = True
        return scores_at_end(self._engine(ids, mask, images=images), mask)


class AbsentReward(RewardComponent):
    """A reward model on a rank that does not have it."""

    reads_text = False
    in_background = False

    def __init__(self, config: RewardComponentConfig, engine: RoleModel, *, logged_alone: bool) -> None:
        super().__init__(config)
        self.packs = engine.packs
        self.shares_prefixes = engine.shares_prefixes
        self.world = engine.world
        self.logged_alone = logged_alone

    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Return a call without scores: this rank has no rows."""
        return lambda: ComponentScores([])


class RetokenizingModelReward(_PresentModel):
    """A reward model that reads the text with its own chat template and tokenizer."""

    def __init__(self, config: RewardComponentConfig, engine: RoleModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, engine)
        self._tokenizer = tokenizer
        self._steps = config.steps
        self._separator = str(getattr(engine.config, SEPARATOR_KEY, ""))
        if config.steps != "last" and not self._separator:
            raise UserError(
                f"reward.components: steps {config.steps} needs a process reward model, {config.model} is not one: "
                "train it with objective.loss steps, or leave steps out"
            )
        self._limit: int | None = getattr(engine.config, "max_position_embeddings", None)

    def _score(self, batch: RewardBatch) -> ComponentScores:
        """Score all micro-batches; rows that cannot be tokenized are replaced, as a forward may run collectives."""
        texts = batch.texts
        empty = StepwiseTokens([int(self._tokenizer.pad_token_id)], [0], 0)  # type: ignore[arg-type]
        tokenized: dict[int | None, StepwiseTokens] = {None: empty}
        failures = {}
        for place, row in enumerate(batch.numbers):
            tokens = self._tokenize(texts.prompts[place], texts.completions[place], texts.tools(place))
            if isinstance(tokens, str):
                failures[place] = tokens
            tokenized[row] = empty if isinstance(tokens, str) else tokens
        values = self._values(batch, lambda indices: self._read([tokenized[row] for row in indices]))
        scores_of_rows = ComponentScores.read(
            [None if place in failures else v for place, v in enumerate(values)], len(values)
        )
        return ComponentScores(scores_of_rows.values, scores_of_rows.failures | failures)

    def _read(self, rows: Sequence[StepwiseTokens]) -> Tensor:
        """Scores of a micro-batch of conversations in the model's own tokens."""
        engine = self._engine
        ids, mask = padded([row.input_ids for row in rows], 0)
        outputs: Tensor = engine(ids, mask)
        if self._steps == "last":
            return scores_at_end(outputs, mask)
        over = {"min": lambda p: p.amin(dim=0), "product": lambda p: p.prod(dim=0), "mean": lambda p: p.mean(dim=0)}
        return torch.stack([over[self._steps](outputs[place, row.ends].sigmoid()) for place, row in enumerate(rows)])

    def _tokenize(self, prompt: list[Message], completion: str, tools: Tools | None) -> StepwiseTokens | str:
        """Token ids of a conversation, as in the model's training, or why the model cannot read it."""
        try:
            if self._steps != "last":
                tokens = encode_steps(prompt, completion, self._tokenizer, self._separator, tools)
            else:
                turn = [{"role": "assistant", "content": completion}]
                ids = encode_completion(prompt, turn, self._tokenizer, tools=tools).input_ids
                tokens = StepwiseTokens(ids, [len(ids) - 1], 0)
        except UserError as error:
            return str(error)
        count = len(tokens.input_ids)
        if not count or (self._limit is not None and count > self._limit):
            return f"its conversation has {count} tokens and the model reads 1 to {self._limit or 'any'}"
        return tokens


def _calibrated(component: RewardComponentConfig, config: PreTrainedConfig, name: str, scores: int) -> list[float]:
    """A value of the calibration in a model's config (supervised/calibration.py), one number per score."""
    calibration = getattr(config, "calibration", None)
    value = calibration.get(name) if isinstance(calibration, dict) else None
    values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, float)]
    if len(values) != scores:
        raise UserError(
            f"reward.components: normalize of {component.label} needs a calibration in its config.json, got {name} "
            f"{value}: train it with objective.calibrate true, or leave normalize out"
        )
    return values


def tokenizes_alike(tokenizer: PreTrainedTokenizerBase, actor_tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if two tokenizers give a conversation the same tokens: same vocabulary and chat template."""
    return (
        tokenizer.get_vocab() == actor_tokenizer.get_vocab()
        and tokenizer.chat_template == actor_tokenizer.chat_template
    )
