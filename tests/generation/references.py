"""Slow versions of what generation computes, one sequence or token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.triton_kernels import LEAST_SHARED_BYTES, compiled


def hugging_face_greedy(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, *, stop: Sequence[int] | None = None
) -> list[int]:
    """Greedy tokens by transformers' generate, of one unpadded prompt."""
    ids = torch.tensor([prompt], device=model.device)
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=stop,
    )
    return whole[0, len(prompt) :].tolist()


def assert_fits(script: str, calls: str) -> None:
    """That kernels compile for a GPU and fit into its shared memory; `calls` give the bytes that they take."""
    taken = compiled(f"{script}print(json.dumps([{calls}]))")
    assert 0 < max(taken) <= LEAST_SHARED_BYTES, taken


def exact_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    tokens: Iterable[tuple[int, int]],
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [T, A, D] in float64 of tokens, given as (sequence, position), over the pages of their sequences."""
    outputs = []
    size, group = keys.shape[1], queries.shape[1] // keys.shape[2]
    for query, (sequence, position) in zip(queries.double(), tokens, strict=True):
        first = 0
        if window is not None:
            first = position // window * window if chunked else max(0, position + 1 - window)
        seen = torch.arange(first, position + 1, device=keys.device)
        at = pages[sequence][seen // size].long()
        k, v = (store[at, seen % size].double().repeat_interleave(group, dim=1) for store in (keys, values))
        scores = torch.einsum("ad,sad->as", query, k) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if bias is not None:
            scores = scores + bias[:, first : position + 1]
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].double()], dim=1)
        outputs.append(torch.einsum("as,sad->ad", scores.softmax(dim=1)[:, : len(seen)], v))
    return torch.stack(outputs)
