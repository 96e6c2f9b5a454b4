"""Shared prefixes against separate rows: outputs and gradients in float64, each family, and which rows share."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hybrid_rlhf.models.families import PACKING_FAMILIES
from hybrid_rlhf.models.packing import attention, batches, prefixes, rows, shares_prefixes, use_packing
from hybrid_rlhf.models.policy import Policy, Scorer
from hybrid_rlhf.models.routers.losses import RouterLoss
from hybrid_rlhf.models.routers.modules import router_modules
from hybrid_rlhf.models.routers.replay import RouterReplay
from tests.support.model_types import tiny_of_type
from tests.support.models import (
    HEAD_FAMILIES,
    InFloat64,
    assert_same_gradients,
    checkpointed,
    distance_of_shared_rows,
    rows_that_begin_alike,
)
from tests.support.tensors import VARLEN_CALLS, take_slow_varlen

KINDS = ["gpt_oss", "gemma3n_text", "gemma4_text", "qwen3_moe", "deepseek_v3", "diffllama"]
"""Sinks, layers that share keys, heads of several sizes, experts, latent attention, differences of attentions."""
HOW = ["in one group", "in groups", "varlen", "copied masks"]


def packed_type(model_type: str, *arguments: Any, **settings: Any) -> PreTrainedModel:
    """A tiny model whose experts compute in float64 too."""
    model = tiny_of_type(model_type, *arguments, **settings)
    use_packing(model)
    assert shares_prefixes(model)
    model.set_experts_implementation("eager")
    return model


def arrange(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How attention computes rows."""
    if how == "in groups":
        monkeypatch.setitem(batches._MIN_SAVING, "cpu", 1)
    elif how == "varlen":
        take_slow_varlen(monkeypatch)
    elif how == "copied masks":  # as ZeRO-3 gives to layers
        attend = attention._attend_rows
        monkeypatch.setattr(
            attention, "_attend_rows", lambda q, k, v, mask, *rest: attend(q, k, v, mask.clone(), *rest)
        )


@pytest.mark.parametrize("how", ["in one group", "varlen"])
@pytest.mark.parametrize("family", [*sorted(PACKING_FAMILIES & HEAD_FAMILIES.keys()), *KINDS])
def test_shared_prefixes_give_the_logprobs_and_gradients_of_separate_rows(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 4 and 8 tokens end inside a rest, at its beginning and in the prefix."""
    model = packed_type(family)
    arrange(how, monkeypatch)
    ids, mask = rows_that_begin_alike()
    wanted = mask & (torch.arange(ids.shape[1]) % 5 != 3)
    assert distance_of_shared_rows(Policy(model), ids, mask, wanted) < 1e-12


@pytest.mark.parametrize("how", HOW[1:])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_every_form_of_attention_gives_them(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_type(family)
    arrange(how, monkeypatch)
    ids, mask = rows_that_begin_alike()
    mask[0, 40] = mask[4, 20] = False  # gaps after a prefix, and in one
    ids = torch.nn.functional.pad(ids, (0, 2))
    mask = torch.nn.functional.pad(mask, (0, 2))
    assert distance_of_shared_rows(Policy(model), ids, mask, mask) < 1e-12
    assert how != "varlen" or family == "gpt_oss" or set(VARLEN_CALLS) == {7, 9}, "rows, without and with prefixes"


def test_checkpointed_layers_learn_the_same() -> None:
    plain, recomputing = packed_type("mistral"), packed_type("mistral")
    checkpointed(recomputing)
    ids, mask = rows_that_begin_alike()
    assert_same_gradients(Policy(recomputing), Policy(plain), ids, mask, mask)


def test_values_and_adapters_learn_as_with_separate_rows() -> None:
    ids, mask = rows_that_begin_alike()
    critic = Scorer(packed_type("llama", AutoModelForSequenceClassification, num_labels=1))
    assert distance_of_shared_rows(critic, ids, mask) < 1e-12
    lora = get_peft_model(packed_type("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    assert distance_of_shared_rows(Policy(lora.base_model.model), ids, mask, mask) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_float32_is_no_farther_from_float64_than_with_separate_rows(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root mean squares, of many numbers, whose sums have another order: their ratio is near 1."""
    model = packed_type(family)
    ids, mask = rows_that_begin_alike()

    def results(module: Policy) -> tuple[Tensor, Tensor]:
        module.zero_grad()
        logprobs = module(ids, mask, mask)[0]
        logprobs.sum().backward()
        return logprobs.detach(), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    shared = results(Policy(model))
    monkeypatch.setattr(batches, "shares_prefixes", lambda lm: False)
    separate = results(Policy(model))
    with InFloat64():
        exact = results(Policy(copy.deepcopy(model).double()))
    for one, other, truth in zip(shared, separate, exact, strict=True):
        assert (one - truth).norm() < 2 * (other - truth).norm()


def test_a_shared_token_passes_through_the_model_once() -> None:
    model = packed_type("llama")
    shapes = []
    model.base_model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].shape))
    ids, mask = rows_that_begin_alike()
    Policy(model)(ids, mask, mask)
    assert shapes == [(1, 198, 64)] and int(mask.sum()) == 312


def best_saving(lengths: list[int], common: list[int]) -> int:
    """The largest number of saved tokens over all partitions of the rows."""
    count = len(lengths)
    best = 0
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(row + 1 for row, cut in enumerate(cuts) if cut), count]
        saved = 0
        for start, stop in itertools.pairwise(edges):
            shared = min([*common[start : stop - 1], *(length - 1 for length in lengths[start:stop])])
            if stop - start > 1:
                saved += (stop - start - 1) * shared if shared >= prefixes.LEAST_TOKENS else -(10**6)
        best = max(best, saved)
    return best


def test_the_prefixes_that_are_found_save_most_tokens() -> None:
    chance = random.Random(0)
    for _ in range(200):
        lengths = [chance.randint(0, 60) for _ in range(chance.randint(1, 8))]
        common = [chance.choice([0, 20, 30, 50]) for _ in lengths]
        runs = prefixes.like_beginnings(lengths, common)
        assert sum(count for count, _ in runs) == len(lengths)
        start = 0
        for count, shared in runs:
            assert count > 1 or shared == lengths[start], "a row alone has all its tokens"
            assert count == 1 or shared <= min([*common[start : start + count - 1], *lengths[start : start + count]])
            start += count
        assert sum((count - 1) * shared for count, shared in runs) == best_saving(lengths, common)


def test_a_row_of_another_prompt_with_the_template_shortens_no_prefix() -> None:
    """Neither before nor after the rows of a prompt."""
    lengths = [90, 100, 110, 120, 95]
    assert prefixes.like_beginnings(lengths, [20, 60, 60, 20, 0]) == [(1, 90), (3, 60), (1, 95)]


def test_rows_with_few_common_tokens_stay_separate() -> None:
    ids, mask = torch.randint(3, 99, (2, 400)), torch.ones(2, 400, dtype=torch.bool)
    ids[1, :70] = ids[0, :70]
    assert prefixes.SharedRows.of(ids, mask) is None, "70 of 800"
    ids[1, :90] = ids[0, :90]
    assert prefixes.SharedRows.of(ids, mask) is not None


def test_parts_of_other_adapters_and_mixers_take_separate_rows() -> None:
    ids, mask = rows_that_begin_alike()
    arguments = batches.pack_parts(packed_type("llama"), ids, mask, [4, 3], device=ids.device)
    assert arguments["input_ids"].shape == (1, 312)
    mixers = tiny_of_type("qwen3_5_text")
    use_packing(mixers)
    assert not shares_prefixes(mixers)
    assert batches.pack(mixers, ids, mask).arguments["input_ids"].shape == (1, 312)


def test_masks_say_all_that_attention_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 drops the attributes."""
    monkeypatch.setitem(batches._MIN_SAVING, "cpu", 1)
    ids, mask = rows_that_begin_alike()
    given = batches.pack(packed_type("llama"), ids, mask).arguments["attention_mask"]
    groups = given.groups
    assert sum(group.keys is not None for group in groups) > 1
    for one, other in zip(rows.groups_of(given.clone()), groups, strict=True):
        assert one.lengths == other.lengths and (one.keys is None) == (other.keys is None)
        assert one.keys is None or torch.equal(one.keys, other.keys)
        assert one.before is None or torch.equal(one.before, other.before)


@pytest.mark.parametrize("how", HOW[:3])
def test_a_nan_stays_in_the_rows_that_have_the_token(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rest, and in a prefix, beside which others are padded."""
    model = packed_type("llama")
    arrange(how, monkeypatch)
    model.get_input_embeddings().weight.requires_grad_(False)[0] = float("nan")
    ids, mask = rows_that_begin_alike()
    policy = Policy(model)
    clean = policy(ids, mask, mask)[0].detach()
    for place, affected in (((0, 41), [0]), ((slice(0, 3), 10), [0, 1, 2])):
        bad = ids.clone()
        bad[place] = 0
        found = policy(bad, mask, mask)[0].detach()
        others = [row for row in range(len(ids)) if row not in affected]
        assert torch.equal(found[others], clean[others]) and not found[affected].isfinite().all(dim=1).any()


def test_gradients_of_a_shared_token_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    rows.take(x, torch.tensor([0] + [1] * 9)).backward(torch.tensor([[1.0], [256.0], *[[1.0]] * 8]).bfloat16())
    assert x.grad is not None and x.grad.flatten().tolist() == [1.0, 264.0]


def replayed(model: PreTrainedModel, *, replays: bool) -> Policy:
    policy = Policy(model)
    policy.replay = RouterReplay(model, experts=4, replays=replays)
    policy.router_loss = RouterLoss(0.5, 0.25, 2)
    return policy


def test_replay_and_router_losses_count_a_shared_token_in_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token with another record is computed in its own row."""
    model = packed_type("qwen3_moe")
    ids, mask = rows_that_begin_alike()
    generator = torch.Generator().manual_seed(0)
    of_tokens = torch.rand(120, len(router_modules(model)), 4, generator=generator).argsort(dim=-1)[..., :2]
    routes = of_tokens[ids]
    other = routes.clone()
    other[1, 30] = other[1, 30].flip(-1) * 0 - 1  # the second row has no record of a token of the prompt
    for replays, given in ((True, routes), (False, routes), (True, other)):
        found = []
        for share in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(batches, "shares_prefixes", lambda lm, share=share: share)
                policy = replayed(copy.deepcopy(model), replays=replays)
                logprobs = policy(ids, mask, mask, routes=given)[0]
            assert policy.router_losses is not None and policy.replay is not None
            found.append((logprobs, policy.router_losses.total, policy.replay.agreement))
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        assert int(found[0][2][1]) == int((given[mask] >= 0).sum())
    assert batches.pack(model, ids, mask, other).tokens > batches.pack(model, ids, mask, routes).tokens == 198
