"""A causal LM that returns log-probs of given tokens, and a classifier that returns a value per token.

Both are thin modules around the Hugging Face model, so that a DeepSpeed engine wraps one complete forward. Padding is
removed before the model (packing/), and the head runs in chunks, on the tokens of a mask only, so that `[B, T, V]` is
never in memory. All outputs are aligned with tokens: entry t belongs to token t.

Shapes: B batch, T time, N real tokens of a batch, H hidden, V vocabulary, E mixtures of experts, k experts per token.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rlhf.functional.logprobs import logprobs_from_hidden
from hybrid_rlhf.functional.masking import last_index, position_ids
from hybrid_rlhf.functional.operations import wide_linear
from hybrid_rlhf.models.families import has_float32_logits, head_convention
from hybrid_rlhf.models.packing import (
    SequenceShard,
    pack,
    packs,
    rows_world,
    shard_rows,
    tensor_world,
    with_summed_gradient,
)
from hybrid_rlhf.models.routers.losses import RouterLoss, RouterLosses
from hybrid_rlhf.models.routers.replay import RouterReplay
from hybrid_rlhf.models.structure import backbone_of

HEAD_CHUNK_TOKENS = 512
"""Number of tokens whose logits are in memory at a time: the smallest for which products are fast."""


class HeadLogprobs(nn.Module):
    """The LM head, which returns log-probs. It owns the head's parameters, so ZeRO-3 gathers them around its
    forward."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        head = lm.get_output_embeddings()
        self.weight = head.weight
        self.bias = getattr(head, "bias", None)
        self._world = tensor_world(lm)
        self.convention = head_convention(lm.config)
        self.float32_logits = has_float32_logits(lm)

    def forward(self, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy [N] float32 of labels [N] after hidden states [N, H]."""
        softcap = self.convention.softcap
        scale = self.convention.scale
        states, bias = (hidden, self.summed_bias) if softcap is None else self.scaled(hidden)
        return logprobs_from_hidden(
            states,
            weight=self.summed_weight,
            bias=bias,
            labels=labels,
            temperature=temperature / scale
            if softcap is None
            else temperature,  # not states * scale, which would be rounded
            softcap=softcap,
            chunk_tokens=HEAD_CHUNK_TOKENS,
            float32_logits=self.float32_logits,
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

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, token_mask: Tensor, routes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`hidden_before` of this model; also computes router losses where gradients are needed."""
        self.router_losses = None
        logits: list[Tensor] | None = [] if self.router_loss is not None and torch.is_grad_enabled() else None
        hidden_and_mask = hidden_before(
            self.lm,
            input_ids,
            attention_mask,
            token_mask,
            router_logits=logits,
            replay=self.replay,
            routes=routes,
        )
        if self.router_loss is not None and logits is not None:
            self.router_losses = self.router_loss(logits, attention_mask.bool())
        return hidden_and_mask

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_mask: Tensor,
        temperature: float = 1.0,
        *,
        routes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the tokens of a mask.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T], true on real tokens.
            token_mask: [B, T], true on tokens whose log-prob is needed; the first token of a row has none and stays 0.
            temperature: divisor of the logits.
            routes: [B, T, E, k], recorded experts of each token, -1 where there are none; used if `replay` is set.

        Returns:
            logprobs and entropy, [B, T] float32, 0 outside token_mask.
        """
        if (world := rows_world(self.lm)) is not None:
            shard = shard_rows(self.lm, world, input_ids, attention_mask.bool())
            return self._in_parts(shard, attention_mask, token_mask, temperature)
        hidden, wanted = self.hidden(input_ids, attention_mask, token_mask, routes)
        logprobs, entropy = self.head(hidden, input_ids[wanted], temperature)
        return scatter_tokens(logprobs, wanted), scatter_tokens(entropy, wanted)

    def _in_parts(
        self, shard: SequenceShard, attention_mask: Tensor, token_mask: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`forward` under sequence or tensor parallelism: the head runs on this rank's part of the tokens."""
        real = attention_mask.bool()
        before, wanted = places_before(real, token_mask)
        asked = torch.zeros(shard.tokens, dtype=torch.bool, device=real.device)
        asked[before] = True
        mine = shard.of_all(asked)[shard.part].nonzero().squeeze(1)
        hidden = shard.hidden(self.lm)
        labels = shard.ids.roll(-1)[shard.part][mine]
        of_part = hidden.new_zeros(2, len(hidden), dtype=torch.float32)
        results = torch.stack(self.head(hidden[mine], labels, temperature))
        logprobs, entropy = shard.own(of_part.index_copy(1, mine, results).t())[before].unbind(1)
        return scatter_tokens(logprobs, wanted), scatter_tokens(entropy, wanted)


class Scorer(nn.Module):
    """Reward model or critic: one value per token, or one per token and head."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.lm = classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The head's output after each real token, [B, T] float32, 0 elsewhere; with several heads [B, T, heads]."""
        real = attention_mask.bool()
        if (world := rows_world(self.lm)) is None:
            values = self.lm.score(backbone_hidden(self.lm, input_ids, real))
        else:
            shard = shard_rows(self.lm, world, input_ids, real)
            values = shard.own(shard.hidden(self.lm, self.lm.score))
        return scatter_tokens(values.squeeze(-1).float(), real)


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
    return outputs[torch.arange(len(outputs), device=outputs.device), last_index(attention_mask)]


def of_heads(outputs: Tensor, heads: Tensor) -> Tensor:
    """Outputs [B, T] of the head that `heads` [B] selects for each row; outputs of a single head are unchanged."""
    if outputs.dim() == 2:
        return outputs
    return outputs.gather(2, heads[:, None, None].expand(*outputs.shape[:2], 1)).squeeze(2)


def values_before(outputs: Tensor) -> Tensor:
    """Value [B, T] of the state before token t: the critic's output after token t - 1."""
    return torch.cat([torch.zeros_like(outputs[:, :1]), outputs[:, :-1]], dim=1)


def hidden_before(
    lm: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    token_mask: Tensor,
    *,
    router_logits: list[Tensor] | None = None,
    replay: RouterReplay | None = None,
    routes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Last hidden states [N, H] before the tokens of a mask, row by row, and the mask [B, T] without first tokens."""
    real = attention_mask.bool()
    hidden = backbone_hidden(lm, input_ids, real, router_logits=router_logits, replay=replay, routes=routes)
    places, wanted = places_before(real, token_mask)
    return hidden[places], wanted


def places_before(real: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [n], among the real tokens row by row, of the tokens before those of a mask [B, T]; and the mask without
    first tokens."""
    place = real.flatten().cumsum(dim=0).view(real.shape) - 1
    wanted = token_mask.bool() & real & (position_ids(real) > 0)
    return place[wanted] - 1, wanted


def backbone_hidden(
    lm: PreTrainedModel,
    input_ids: Tensor,
    real: Tensor,
    *,
    router_logits: list[Tensor] | None = None,
    replay: RouterReplay | None = None,
    routes: Tensor | None = None,
) -> Tensor:
    """Last hidden states [N, H] of the real tokens of [B, T], row by row; packed if the model uses packed rows.

    Args:
        lm: the causal LM or classifier.
        input_ids: [B, T] int64.
        real: [B, T] bool, true on real tokens.
        router_logits: list that receives the router logits [N, experts] of each mixture.
        replay: replays or compares `routes`.
        routes: [B, T, E, k], recorded experts of each token.
    """
    if (world := rows_world(lm)) is not None:
        shard = shard_rows(lm, world, input_ids, real)
        return shard.own(shard.hidden(lm))
    backbone = backbone_of(lm)
    options: dict[str, Any] = {"use_cache": False}
    if router_logits is not None:
        options["output_router_logits"] = True
    if packs(lm):
        packed = pack(lm, input_ids, real)
        options |= packed.arguments
        in_order = packed.unpacked
        routes = None if routes is None else packed.packed(routes[real])
    else:
        # real tokens first: Llama 4 scales queries by their index in the row
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        input_ids = input_ids.gather(1, order)
        real = real.gather(1, order)
        if "position_ids" in inspect.signature(backbone.forward).parameters:  # families with ALiBi have none
            options["position_ids"] = position_ids(real)
        options |= {"input_ids": input_ids, "attention_mask": real.long()}
        in_order = lambda states: states[real.flatten()]  # noqa: E731
        routes = None if routes is None else routes.take_along_dim(order[:, :, None, None], dim=1).flatten(0, 1)
    with contextlib.nullcontext() if replay is None else replay.of(routes):
        output = backbone(**options)
    if router_logits is not None:
        router_logits += [in_order(logits.flatten(0, -2)) for logits in output.router_logits]
    hidden: Tensor = in_order(output.last_hidden_state.flatten(0, 1))
    return hidden


def scatter_tokens(flat: Tensor, where: Tensor) -> Tensor:
    """Values [N] or [N, K] at the true entries of `where` [B, T], 0 elsewhere."""
    rest = flat.shape[1:]
    places = where[(..., *(None for _ in rest))]
    return torch.zeros((*where.shape, *rest), dtype=flat.dtype, device=flat.device).masked_scatter(places, flat)
