"""A causal LM that returns log-probs of given tokens, and a classifier that returns a value per token.

Both are thin modules around the Hugging Face model, so that a DeepSpeed engine wraps one complete forward. Padding is
removed before the model (packing/), and the head runs in chunks, on the tokens of a mask only, so that `[B, T, V]` is
never in memory. All outputs are aligned with tokens: entry t belongs to token t.

Shapes: B batch, T time, N real tokens of a batch, H hidden, V vocabulary, E mixtures of experts, k experts per token.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.distillation import (
    DistillationRule,
    OutputHead,
    divergence_from_hidden,
    top_logprobs_from_hidden,
)
from hybrid_rlhf.functional.logprobs import head_chunk_tokens, logprobs_from_hidden
from hybrid_rlhf.functional.masking import last_index, position_ids
from hybrid_rlhf.functional.operations import wide_linear
from hybrid_rlhf.functional.transfers import moved
from hybrid_rlhf.models.families import has_float32_logits, head_convention
from hybrid_rlhf.models.packing import (
    SequenceShard,
    pack,
    packs,
    rows_world,
    shard_rows,
    take,
    tensor_world,
    with_summed_gradient,
)
from hybrid_rlhf.models.routers.losses import RouterLoss, RouterLosses
from hybrid_rlhf.models.routers.replay import RouterReplay
from hybrid_rlhf.models.structure import backbone_of
from hybrid_rlhf.models.vision import ImageEncoder, ImageRows, Images, PlacedImages, hidden_with_images

CHUNK_TOKENS = 256
"""Number of tokens for which the logits of two models are in memory at a time."""


@dataclass(frozen=True)
class TopTokens:
    """What a teacher is asked for besides log-probs: its most likely tokens."""

    k: int
    rows: int
    """Number of tokens of the vocabulary; later rows of the head are not tokens."""


@dataclass(frozen=True)
class TeacherTargets:
    """The teacher's predictions for the tokens of a batch."""

    hidden: Tensor
    """[N, H], hidden states before the tokens."""
    head: HeadLogprobs
    """The teacher's head, with gathered weights."""
    rule: DistillationRule
    weights: Tensor | None = None
    """[B, T], of each token's divergence; None: 1, and no log-probs are computed besides."""


class HeadLogprobs(nn.Module):
    """The LM head, which returns log-probs. It owns the head's parameters, so ZeRO-3 gathers them around its
    forward."""

    def __init__(self, lm: PreTrainedModel, *, device_type: str | None = None) -> None:
        """Take a causal LM; a plan gives the type of device that it is for, as its tensors have none."""
        super().__init__()
        self._device_type = device_type
        head = lm.get_output_embeddings()
        self.weight = head.weight
        self.bias = getattr(head, "bias", None)
        self._world = tensor_world(lm)
        self.convention = head_convention(lm.config)
        self.float32_logits = has_float32_logits(lm)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        temperature: float,
        targets: TeacherTargets | None = None,
        top: TopTokens | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probs [N] or [N, m] and entropy [N] float32 of labels [N] or [N, m] after hidden states [N, H]. With
        targets the sums of loss, divergence and -log p(labels), scalars; after the log-probs if they have weights. With
        `top` the result of `top_logprobs_from_hidden`."""
        if top is not None:
            states, head = self.output_head(hidden)
            size = {"k": top.k, "rows": top.rows, "chunk_tokens": CHUNK_TOKENS}
            return (top_logprobs_from_hidden(states, head, labels=labels, temperature=temperature, **size),)
        if targets is None:
            return self._logprobs(hidden, labels, temperature)
        sums = self._compared(hidden, labels, targets)
        return sums if targets.weights is None else (*self._logprobs(hidden, labels, temperature), *sums)

    def _logprobs(self, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        softcap = self.convention.softcap
        if softcap is None:  # the scale divides the temperature: states times the scale would be rounded
            states, bias = hidden, self.summed_bias
            temperature = temperature / self.convention.scale
        else:
            states, bias = self.scaled(hidden)
        return logprobs_from_hidden(
            states,
            weight=self.summed_weight,
            bias=bias,
            labels=labels,
            temperature=temperature,
            softcap=softcap,
            chunk_tokens=head_chunk_tokens(
                len(self.weight), device_type=self._device_type or hidden.device.type, dtype=hidden.dtype
            ),
            float32_logits=self.float32_logits,
            banned=self.convention.banned,
        )

    @property
    def summed_weight(self) -> Tensor:
        """The weight; under tensor parallelism its gradient is summed over the ranks, each of which has some tokens."""
        return self.weight if self._world is None else with_summed_gradient(self.weight, self._world)

    @property
    def summed_bias(self) -> Tensor | None:
        """The bias, as the weight."""
        bias: Tensor | None = self.bias
        return bias if bias is None or self._world is None else with_summed_gradient(bias, self._world)

    def _compared(self, hidden: Tensor, labels: Tensor, targets: TeacherTargets) -> tuple[Tensor, Tensor, Tensor]:
        states, head = self.output_head(hidden)
        teacher_states, teacher_head = targets.head.output_head(targets.hidden)
        return divergence_from_hidden(
            states,
            head,
            teacher_hidden=teacher_states,
            teacher_head=teacher_head,
            labels=labels,
            rule=targets.rule,
            weights=targets.weights,
            chunk_tokens=CHUNK_TOKENS,
        )

    def output_head(self, hidden: Tensor) -> tuple[Tensor, OutputHead]:
        """Hidden states and head, scaled by the family's logit scale."""
        states, bias = self.scaled(hidden)
        convention = self.convention
        return states, OutputHead(self.summed_weight, bias, convention.softcap, self.float32_logits, convention.banned)

    def scaled(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states and bias, multiplied by the family's logit scale."""
        scale = self.convention.scale
        bias = self.summed_bias
        return (hidden, bias) if scale == 1.0 else (hidden * scale, None if bias is None else bias * scale)


class Policy(nn.Module):
    """Actor or reference: token log-probs of a causal LM."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.head = HeadLogprobs(lm)
        self.router_loss: RouterLoss | None = None
        """Set it to compute the losses of the routers in each forward with gradient."""
        self.router_losses: RouterLosses | None = None
        """Router losses of the last forward."""
        self.replay: RouterReplay | None = None
        """Set it to compare the experts of a forward with recorded ones, or to use the recorded ones."""

    def rows(self, *masks: Tensor, **options: Any) -> ModelRows:
        """`model_rows` for this model."""
        return model_rows(
            self.lm, *masks, router_losses=self.router_loss is not None and torch.is_grad_enabled(), **options
        )

    def hidden(self, rows: ModelRows) -> Tensor:
        """`backbone_hidden` of this model; also computes router losses where gradients are needed."""
        self.router_losses = None
        logits: list[Tensor] = []
        hidden = backbone_hidden(self.lm, rows, replay=self.replay, router_logits=logits)
        if self.router_loss is not None and rows.routers is not None:
            self.router_losses = self.router_loss(logits, rows.routers.sequences, rows.routers.lengths)
        return hidden

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_mask: Tensor,
        temperature: float = 1.0,
        targets: TeacherTargets | None = None,
        *,
        candidates: Tensor | None = None,
        top: TopTokens | None = None,
        routes: Tensor | None = None,
        images: Images | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """Log-probs and entropies of the tokens of a mask.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T], true on real tokens.
            token_mask: [B, T], true on tokens whose log-prob is needed; the first token of a row has none and stays 0.
            temperature: divisor of the logits.
            targets: a teacher's states before these tokens.
            candidates: [B, T, m], further tokens in the place of each, whose log-probs are needed.
            top: which likely tokens are wanted instead.
            routes: [B, T, E, k], recorded experts of each token, -1 where there are none; used if `replay` is set.
            images: images of the rows.
            device: that of the model, if the rows are on the host; None: that of the rows.

        Returns:
            logprobs and entropy, [B, T] float32 on the device, 0 outside token_mask; with candidates the log-probs are
            [B, T, 1 + m], those of the row's token first. With targets the sums of loss, divergence and -log p of the
            tokens, scalars, after the log-probs if they have weights. With `top` that of `top_logprobs_from_hidden`,
            [B, T, 1 + 2 k].
        """
        options = {"routes": routes, "images": images, "device": device}
        rows = self.rows(input_ids, attention_mask, token_mask, candidates=candidates, **options)
        if rows.shard is not None:
            results = self._in_parts(rows, rows.shard, temperature)
        else:
            weights = None if targets is None else targets.weights
            if targets is not None and weights is not None:
                targets = replace(targets, weights=weights.flatten()[rows.cells])
            results = self.head(self.hidden(rows), rows.labels, temperature, targets, top)
        of_tokens = [of for of in results if of.dim()]
        return (*map(rows.in_cells, of_tokens), *results[len(of_tokens) :])

    def _in_parts(self, rows: ModelRows, shard: SequenceShard, temperature: float) -> Sequence[Tensor]:
        """Log-probs and entropies under sequence or tensor parallelism: the head runs on this rank's part of the
        tokens."""
        hidden = shard.hidden(self.lm)
        of_part = hidden.new_zeros(2, len(hidden), dtype=torch.float32)
        results = torch.stack(self.head(take(hidden, shard.asked), shard.labels, temperature))
        return _taken(shard.own(of_part.index_copy(1, shard.asked, results).t()), rows.outputs).unbind(1)


class Scorer(nn.Module):
    """Reward model or critic: one value per token, or one per token and head."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.lm = classifier

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        images: Images | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The head's output after each real token, [B, T] float32, 0 elsewhere; with several heads [B, T, heads].
        Arguments as of Policy."""
        rows = model_rows(self.lm, input_ids, attention_mask, images=images, device=device)
        return rows.in_cells(backbone_hidden(self.lm, rows, head=self.lm.score).squeeze(-1).float())


@contextlib.contextmanager
def wide_logits(lm: PreTrainedModel) -> Iterator[None]:
    """Context in which the forward of a Hugging Face model computes float32 logits, if `has_float32_logits`.

    It is used by generation through the module; the head has no gradient.
    """
    head = lm.get_output_embeddings()
    if not has_float32_logits(lm) or not isinstance(head, nn.Linear) or head.weight.dtype == torch.float32:
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        return wide_linear(hidden.flatten(0, -2), head.weight, head.bias).unflatten(0, hidden.shape[:-1])

    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]


def scores_at_end(outputs: Tensor, attention_mask: Tensor) -> Tensor:
    """Score [B], or scores [B, heads], of each row: the output at its last real token by the mask, not by token id."""
    last = torch.arange(len(outputs)), last_index(attention_mask).cpu()
    return outputs[moved(last, outputs.device)]


def of_heads(outputs: Tensor, heads: Tensor) -> Tensor:
    """Outputs [B, T] of the head that `heads` [B] selects for each row; outputs of a single head are unchanged."""
    if outputs.dim() == 2:
        return outputs
    return outputs.gather(2, heads[:, None, None].expand(*outputs.shape[:2], 1)).squeeze(2)


def values_before(outputs: Tensor) -> Tensor:
    """Value [B, T] of the state before token t: the critic's output after token t - 1."""
    return torch.cat([torch.zeros_like(outputs[:, :1]), outputs[:, :-1]], dim=1)


@dataclass(frozen=True)
class RoutedTokens:
    """The real tokens of rows [B, T], row by row."""

    outputs: Tensor | None
    """[N] index of the backbone's output for each; None: the outputs as they are."""
    sequences: Tensor
    """[N] row of each."""
    lengths: Tensor
    """[B] tokens of each row."""


@dataclass(frozen=True)
class ModelRows:
    """Rows [B, T] as a model reads them, and where its outputs go; a forward with them waits for nothing."""

    arguments: dict[str, Any]
    """Arguments of the backbone."""
    is_packed: bool
    shape: tuple[int, int]
    """B and T."""
    cells: Tensor
    """[n] indices in [B * T] of the tokens that outputs are for."""
    labels: Tensor
    """[n] these tokens, or [n, 1 + m] with other candidates."""
    outputs: Tensor | None
    """[n] index of the backbone's output for each of them; None: the outputs as they are."""
    routers: RoutedTokens | None
    """For losses of routers, which are of all real tokens."""
    routes: Tensor | None = None
    """Recorded experts [..., E, k] of the tokens that the backbone computes."""
    counts: Tensor | None = None
    """Number of rows that share each of them; None: each is of one row."""
    shard: SequenceShard | None = None
    """Under sequence or tensor parallelism, in place of the arguments."""
    images: PlacedImages | None = None
    """Images of the tokens that the backbone computes, or a blank one."""

    def in_cells(self, values: Tensor) -> Tensor:
        """Values [B, T, ...] from those [n, ...] of the tokens, 0 elsewhere."""
        return scatter_tokens(values, self.cells, self.shape)


def model_rows(
    lm: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    token_mask: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    routes: Tensor | None = None,
    router_losses: bool = False,
    images: Images | None = None,
    device: torch.device | None = None,
) -> ModelRows:
    """Prepare rows on the host, packed if the model packs them, and bring them to the device by one copy.

    Args:
        lm: the causal LM or classifier.
        input_ids: [B, T] int64.
        attention_mask: [B, T], true on real tokens.
        token_mask: [B, T], true on tokens before which outputs are read, except the first of a row; None: outputs after
            all real tokens are read.
        candidates: [B, T, m], further labels of each token.
        routes: [B, T, E, k], recorded experts of each token.
        router_losses: true to compute losses of routers.
        images: images of the rows, on the host; a batch with one is padded if tokens attend to later ones of it.
        device: that of the model; None: that of the ids, from which they are brought to the host.

    Raises:
        UserError: for images of a model that reads none, or whose rows several ranks compute together.
    """
    device = device or input_ids.device
    input_ids, real = input_ids.cpu(), attention_mask.bool().cpu()
    routes = None if routes is None else routes.cpu()
    asked, before = real, torch.arange(0)
    if token_mask is not None:
        asked = token_mask.bool().cpu() & real & (position_ids(real) > 0)
        before = (real.flatten().cumsum(dim=0).view(real.shape) - 1)[asked] - 1
    counts = order = shard = None
    arguments: dict[str, Any] = {}
    of_images = None if images is None else _image_rows(lm, input_ids, real, images)
    is_packed = packs(lm) and (of_images is None or of_images.are_causal)
    if (world := rows_world(lm)) is not None:
        shard = shard_rows(lm, world, input_ids, real, before, device=device)
    elif is_packed:
        keys = None if of_images is None else of_images.keys(input_ids, real)
        packed = pack(lm, input_ids, real, routes, keys=keys, device=device)
        arguments, order = packed.arguments, packed.order
        if routes is not None:
            routes, counts = packed.packed(routes[real]), packed.counts
    else:
        # real tokens first: Llama 4 scales queries by their index in the row
        first = (~real).to(torch.int8).argsort(dim=1, stable=True)
        moved_real = real.gather(1, first)
        if "position_ids" in inspect.signature(backbone_of(lm).forward).parameters:  # families with ALiBi have none
            arguments["position_ids"] = position_ids(moved_real)
        arguments |= {"input_ids": input_ids.gather(1, first), "attention_mask": moved_real.long()}
        routes = None if routes is None else routes.take_along_dim(first[:, :, None, None], dim=1).flatten(0, 1)
        order = moved_real.flatten().nonzero().squeeze(1)
    placed = None
    if of_images is not None:
        placed = of_images.placed(order, arguments["input_ids"].numel(), lm.dtype)
        if "position_ids" in arguments:
            arguments["position_ids"] = of_images.position_ids(arguments["position_ids"], order)
    outputs = order
    if token_mask is not None:
        outputs = before if order is None else order[before]
    labels = input_ids[asked]
    if candidates is not None:
        labels = torch.cat([labels[:, None], candidates.cpu()[asked].long()], dim=1)
    rows = ModelRows(
        arguments,
        is_packed,
        (len(real), real.shape[1]),
        asked.flatten().nonzero().squeeze(1),
        labels,
        outputs,
        RoutedTokens(order, real.nonzero()[:, 0], real.sum(dim=1)) if router_losses else None,
        routes,
        counts,
        shard,
        placed,
    )
    return moved(rows, device)


def _image_rows(lm: PreTrainedModel, input_ids: Tensor, real: Tensor, images: Images) -> ImageRows:
    if (world := rows_world(lm)) is not None:
        raise UserError(
            "images need model.sequence_parallel and model.tensor_parallel 1, got "
            f"{world.size} ranks that compute rows together: set them to 1"
        )
    return ImageRows.of(ImageEncoder(lm), input_ids, real, images)


def backbone_hidden(
    lm: PreTrainedModel,
    rows: ModelRows,
    *,
    head: nn.Module | None = None,
    replay: RouterReplay | None = None,
    router_logits: list[Tensor] | None = None,
) -> Tensor:
    """Last hidden states [n, H] that are read of rows, or outputs of a head after them.

    Args:
        lm: the causal LM or classifier.
        rows: its rows.
        head: module after the backbone, which computes a shared token once.
        replay: replays or compares the routes of the rows.
        router_logits: list that receives the router logits [N, experts] of each mixture, if the rows have `routers`.
    """
    if rows.shard is not None:
        return _taken(rows.shard.own(rows.shard.hidden(lm, head)), rows.outputs)
    options = {} if rows.routers is None else {"output_router_logits": True}
    with contextlib.nullcontext() if replay is None else replay.of(rows.routes, rows.counts):
        if rows.images is None:
            output = backbone_of(lm)(**rows.arguments, **options, use_cache=False)
        else:
            output = hidden_with_images(lm, rows.arguments, rows.images, **options, use_cache=False)
    if rows.routers is not None and router_logits is not None:
        router_logits += [_taken(logits.flatten(0, -2), rows.routers.outputs) for logits in output.router_logits]
    states: Tensor = output.last_hidden_state.flatten(0, 1)
    if rows.is_packed:
        return _taken(states if head is None else head(states), rows.outputs)
    states = _taken(states, rows.outputs)
    return states if head is None else head(states)


def _taken(states: Tensor, index: Tensor | None) -> Tensor:
    return states if index is None else take(states, index)


def scatter_tokens(flat: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
    """Values [N, ...] at indices [N] of [B * T], 0 elsewhere: [B, T, ...]."""
    whole = flat.new_zeros(shape[0] * shape[1], *flat.shape[1:])
    return whole.index_copy(0, cells, flat).unflatten(0, shape)
