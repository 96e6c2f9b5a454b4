"""Rows that several ranks compute together: families and activation memory against one rank, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rlhf.models.packing import require_sequence_parallelism, set_sequence_world, use_packing
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.tiled_mlp import tile_mlps
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.models import build_model
from tests.support.ranks import run_ranks

FAMILIES = ("llama", "qwen3", "gemma2", "mistral", "phi3")
LENGTHS = [4, 0, 90, 23, 80]
"""Rows of all ranks, in groups of like lengths; one has no token."""


def policy(family: str, **settings: Any) -> Policy:
    model = build_model(family, **settings)
    use_packing(model)
    return Policy(model)


def rows(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, real tokens, and the tokens that count: two of three."""
    time = torch.arange(max(1, *lengths))
    ids = torch.randint(3, 90, (len(lengths), len(time)), generator=torch.Generator().manual_seed(sum(lengths)))
    real = time < torch.tensor(lengths)[:, None]
    return ids, real, real & (ids % 3 > 0)


def sums(module: Policy, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sums of log-probs and entropies; rows are drawn one by one, so that any division has the same."""
    parts = [rows([length]) for length in lengths]
    width = max(part[0].shape[1] for part in parts)
    ids, real, counted = (
        torch.cat([torch.nn.functional.pad(part[place], (0, width - part[place].shape[1])) for part in parts])
        for place in range(3)
    )
    of_tokens, entropy = module(ids, real, counted, 0.7)
    weights = 1 + torch.arange(width) % 4
    return (of_tokens * weights).sum(), (entropy * weights).sum()


def gradients(module: Policy, lengths: list[int]) -> tuple[float, list[torch.Tensor]]:
    logprobs, entropies = sums(module, lengths)
    total = logprobs + 0.1 * entropies
    total.backward()
    return float(total.detach()), [p.grad for p in module.parameters() if p.grad is not None]


def together(world: World, families: tuple[str, ...], checkpoints: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for family in families:
        module = policy(family)
        set_sequence_world(module.lm, world)
        if checkpoints:
            module.lm.gradient_checkpointing_enable({"use_reentrant": False})
            module.train()
        mine = LENGTHS[world.rank :: world.size]
        total, grads = gradients(module, mine)
        results[family] = (
            float(world.all_reduce(torch.tensor(total))),
            [world.all_reduce(grad.clone()) for grad in grads],
        )
    return results


@pytest.mark.parametrize(
    ("ranks", "families", "checkpoints"),
    [(2, FAMILIES, False), pytest.param(2, ("llama",), True), pytest.param(4, ("llama", "qwen3"), False)],
    ids=["2 ranks", "checkpoints", "4 ranks"],
)
def test_ranks_compute_rows_together_as_one_rank_does(
    ranks: int, families: tuple[str, ...], checkpoints: bool, tmp_path: Any
) -> None:
    """With two key heads and four ranks, keys are repeated; windows and soft caps are those of whole rows."""
    results = run_ranks(together, ranks, tmp_path, families, checkpoints)
    for family in families:
        expected_total, expected = gradients(policy(family), LENGTHS)
        for result in results:
            total, grads = result[family]
            assert total == pytest.approx(expected_total, rel=1e-5), family
            assert len(grads) == len(expected)
            for mine, theirs in zip(grads, expected, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max())), family


def peak(world: World, length: int) -> float:
    """Bytes that are alive at most during a forward and a backward of one row, above those of the weights."""
    module = policy("llama", hidden_size=128, intermediate_size=256)
    if world.size > 1:
        set_sequence_world(module.lm, world)
    ids, real, counted = rows([length if world.is_main else 0])
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counter = LiveBytes("cpu")
    for tensor in (*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)):
        counter.count(tensor.detach())
    before = counter.live
    with counter:
        logprobs, _ = module(ids, real, counted)
        logprobs.sum().backward()
    return float(counter.peak - before)


def test_two_ranks_halve_the_activations_of_a_row(tmp_path: Any) -> None:
    (alone,) = run_ranks(peak, 1, tmp_path, 2048)
    both = run_ranks(peak, 2, tmp_path, 2048)
    assert max(both) <= 0.55 * alone


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama", 1, "needs packed rows"),
        ("qwen3_5", 2, "other layers that mix tokens"),
        ("qwen3_moe", 2, "has a mixture of experts"),
        ("llama", 3, "must divide the number of attention heads"),
        ("phi3 longrope", 2, "rotary positions that do not depend on the length"),
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, size: int, reason: str) -> None:
    model = variant(name)
    if size > 1:
        use_packing(model)
    with user_error(reason):
        require_sequence_parallelism(model, size)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_mlp_in_parts_is_that_of_the_whole(checkpoints: bool) -> None:
    expected = gradients(policy("llama"), [23, 4])
    module = policy("llama")
    tile_mlps(module.lm, 40)  # more than there are tokens
    if checkpoints:
        module.lm.gradient_checkpointing_enable({"use_reentrant": False})
        module.train()
    total, grads = gradients(module, [23, 4])
    assert total == pytest.approx(expected[0], rel=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(grads, expected[1], strict=True))


@pytest.mark.parametrize("family", ["opt", "qwen3_moe", "bloom"])
def test_layers_without_an_mlp_module_have_no_parts(family: str) -> None:
    with user_error("model.mlp_parts is for"):
        tile_mlps(variant(family), 2)
