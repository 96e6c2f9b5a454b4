"""Reward models as parts of the reward: one reads the actor's own tokens, or the text in tokens of its own.

A model trained on another chat template or vocabulary would score noise on the actor's tokens. For it completions
become text again, the conversation is rendered with its template, and its score is read at its last real token. Of a
model with several scores all are read in one pass, and summed by the weights that the part gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.experience import Sequences
from hybrid_rlhf.algorithms.rewards.parts import Ratings, RewardPart, Share
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rewards import RewardPartConfig
from hybrid_rlhf.data.chat import encode_answer
from hybrid_rlhf.data.messages import Message, Tools
from hybrid_rlhf.data.stepwise import SEPARATOR_KEY, Steps, answer_steps
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.models.loading import stored_heads
from hybrid_rlhf.models.policy import scores_at_end


class Reading:
    """What a model's scores are to a part: one number a row."""

    def __init__(self, part: RewardPartConfig, config: PreTrainedConfig) -> None:
        """Take the part and the model's config.

        Raises:
            UserError: when the model has not what the part asks for.
        """
        heads = stored_heads(config)
        unknown = sorted(set(part.head_weights) - set(heads))
        if unknown:
            raise UserError(
                f"reward.parts: head_weights of {part.label} names its scores, {', '.join(heads) or 'it has one'}, got "
                f"{unknown[0]}: {'name one of them' if heads else 'leave it out'}"
            )
        self._weights = [part.head_weights.get(name, 0.0 if part.head_weights else 1.0) for name in heads]
        self._mean, self._std = [0.0], [1.0]
        if part.normalise:
            self._mean, self._std = (_calibrated(part, config, name, max(len(heads), 1)) for name in ("mean", "std"))

    def __call__(self, scores: Tensor) -> Tensor:
        """[n] of scores [n], or [n, heads]."""
        mean, std = (torch.tensor(value, device=scores.device) for value in (self._mean, self._std))
        scores = (scores - mean) / std.clamp(min=1e-6)  # [n] with [1], or [n, heads] with [heads]
        return scores if scores.dim() == 1 else scores @ torch.tensor(self._weights, device=scores.device)


class ModelPart(RewardPart):
    """A reward model that reads the actor's tokens."""

    reads_text = False
    in_background = False

    def __init__(
        self, config: RewardPartConfig, engine: ModelEngine, *, end: tuple[int, Sequence[int]] | None = None
    ) -> None:
        """Take the model, and the end of a turn with what follows it (data/chat.turn_end): it was trained to score
        there."""
        super().__init__(config)
        self._engine, self._end = engine, end
        self._reading = Reading(config, engine.lm.config)
        self.packs = engine.packs

    def begin(self, share: Share) -> Callable[[], Ratings]:
        """Nothing yet: the forwards run when the ratings are asked for."""
        return lambda: self._rate(share)

    def _rate(self, share: Share) -> Ratings:
        with self._engine.on_device():
            scores = [
                score_tokens(self._engine, share.sequences, indices, self._end)[_present(indices)]
                for indices in share.micro_batches
            ]
        return Ratings.read(self._reading(torch.cat(scores)).tolist(), len(share.rows))


class RetokenizingModelPart(RewardPart):
    """A reward model that reads the text in its own chat template and tokens."""

    in_background = False

    def __init__(self, config: RewardPartConfig, engine: ModelEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config)
        self._engine, self._tokenizer = engine, tokenizer
        self._reading = Reading(config, engine.lm.config)
        self.packs = engine.packs
        self._steps = config.steps
        self._separator = str(getattr(engine.lm.config, SEPARATOR_KEY, ""))
        if config.steps != "last" and not self._separator:
            raise UserError(
                f"reward.parts: steps {config.steps} needs a process reward model, {config.model} is none: train it "
                "with preference.loss steps, or leave steps out"
            )
        self._limit: int | None = getattr(engine.lm.config, "max_position_embeddings", None)

    def begin(self, share: Share) -> Callable[[], Ratings]:
        """Nothing yet: the forwards run when the ratings are asked for."""
        return lambda: self._rate(share)

    def _rate(self, share: Share) -> Ratings:
        """Every rank runs every micro-batch, whatever it cannot tokenise: a forward may hold collectives."""
        answers, empty = share.answers, Steps([int(self._tokenizer.pad_token_id)], [0], 0)  # type: ignore[arg-type]
        tokenized: dict[int | None, Steps] = {None: empty}
        failures = {}
        for place, row in enumerate(share.rows):
            tokens = self._tokenize(answers.prompts[place], answers.completions[place], answers.tools(place))
            if isinstance(tokens, str):
                failures[place] = tokens
            tokenized[row] = empty if isinstance(tokens, str) else tokens
        with self._engine.on_device():
            scores = [
                score_text(self._engine, [tokenized[row] for row in indices], self._steps)[_present(indices)]
                for indices in share.micro_batches
            ]
        values = self._reading(torch.cat(scores)).tolist()
        ratings = Ratings.read([None if place in failures else v for place, v in enumerate(values)], len(values))
        return Ratings(ratings.values, ratings.failures | failures)

    def _tokenize(self, prompt: list[Message], completion: str, tools: Tools | None) -> Steps | str:
        """Token ids of a conversation, as the model was trained on, or why there are none that it reads."""
        try:
            if self._steps != "last":
                found = answer_steps(prompt, completion, self._tokenizer, self._separator, tools)
            else:
                answer = [{"role": "assistant", "content": completion}]
                ids = encode_answer(prompt, answer, self._tokenizer, tools=tools).input_ids
                found = Steps(ids, [len(ids) - 1], 0)
        except UserError as error:
            return str(error)
        count = len(found.input_ids)
        if not count or (self._limit is not None and count > self._limit):
            return f"its conversation has {count} tokens and the model reads 1 to {self._limit or 'any'}"
        return found


def _calibrated(part: RewardPartConfig, config: PreTrainedConfig, name: str, scores: int) -> list[float]:
    """What algorithms/calibration.py left in a model's config, one number a score."""
    calibration = getattr(config, "calibration", None)
    value = calibration.get(name) if isinstance(calibration, dict) else None
    values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, float)]
    if len(values) != scores:
        raise UserError(
            f"reward.parts: normalise of {part.label} needs a calibration in its config.json, got {name} {value}: "
            "train it with preference.calibrate true, or leave normalise out"
        )
    return values


def score_tokens(
    engine: ModelEngine, sequences: Sequences, indices: Sequence[int | None],
    end: tuple[int, Sequence[int]] | None = None,
) -> Tensor:  # fmt: skip
    """Scores [n], or of several heads [n, heads], of the rows of one micro-batch, in the actor's tokens; float32.

    Args:
        engine: of the model.
        sequences: of the rollout.
        indices: the rows.
        end: a last token, and those that follow a row which ends with it, where the model has positions for them.
    """
    batch = sequences.rows(indices)
    last, tail = end or (-1, ())
    ids, mask = (pad(tokens, (0, len(tail))) for tokens in (batch.input_ids, batch.attention_mask))
    lengths, limit = batch.lengths[:, None], getattr(engine.lm.config, "max_position_embeddings", None)
    ended = ids.gather(1, lengths - 1) == last
    if limit is not None:
        ended &= lengths + len(tail) <= limit
    ended = ended[:, 0].nonzero()
    places = lengths[ended[:, 0]] + torch.arange(len(tail), device=ids.device)
    ids[ended, places] = torch.tensor(tail, dtype=ids.dtype, device=ids.device)
    mask[ended, places] = True
    return scores_at_end(engine(ids, mask), mask)


def score_text(engine: ModelEngine, rows: Sequence[Steps], steps: str = "last") -> Tensor:
    """Scores [n], or of several heads [n, heads], of conversations in the model's own tokens; float32.

    Args:
        engine: of the model.
        rows: the conversations.
        steps: see RewardPartConfig.
    """
    ids = pad_sequence([torch.tensor(row.input_ids) for row in rows], batch_first=True).to(engine.device)
    lengths = torch.tensor([len(row.input_ids) for row in rows], device=engine.device)
    mask = torch.arange(ids.shape[1], device=engine.device) < lengths[:, None]
    outputs: Tensor = engine(ids, mask)
    if steps == "last":
        return scores_at_end(outputs, mask)
    over = {"min": lambda p: p.amin(dim=0), "product": lambda p: p.prod(dim=0), "mean": lambda p: p.mean(dim=0)}[steps]
    return torch.stack([over(outputs[place, row.ends].sigmoid()) for place, row in enumerate(rows)])


def reads_the_same(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give a conversation the same tokens: vocabulary and chat template."""
    return tokenizer.get_vocab() == other.get_vocab() and tokenizer.chat_template == other.chat_template


def _present(indices: Sequence[int | None]) -> list[int]:
    """Places of the rows that are not empty."""
    return [place for place, index in enumerate(indices) if index is not None]
