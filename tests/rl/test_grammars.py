"""Rollouts that follow a grammar, and how training weighs them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.functional.losses import correction_weights, sampler_ratio
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.rl.metrics import rollout_metrics
from hybrid_rlhf.runtime.world import World
from tests.support.rl import ALGORITHM, SAMPLING, build_parts, collect
from tests.support.tiny import tiny_tokenizer

pytest.importorskip("llguidance")
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def test_a_grammar_in_rollouts_is_weighed_by_what_it_leaves(world: World, paths: dict[str, str]) -> None:
    """Completions are valid, and the weight of each token is the probability of all allowed tokens."""
    sampling = replace(SAMPLING, sampling=SamplingParams(n=2, max_new_tokens=80, response_format=FORMAT))
    parts = build_parts(world, paths, algorithm=replace(ALGORITHM, correction=CorrectionConfig()), sampling=sampling)
    parts.sampler._stop["stop_token_ids"] = (2,)
    batch, plan = collect(parts)
    rollout, mask = batch.rollout, batch.rollout.response_mask
    texts = [
        tiny_tokenizer().decode(ids[sampled], skip_special_tokens=True)
        for ids, sampled in zip(rollout.input_ids, mask, strict=True)
    ]
    assert all(text.startswith("{") for text in texts)
    ended = [json.loads(text) for text, length in zip(texts, mask.sum(dim=1), strict=True) if length < 80]
    assert ended and all(value in ({"a": True}, {"a": False}) for value in ended)
    weights = sampler_ratio(rollout.old_logprobs, sampler_logprobs=rollout.drawn_logprobs, mask=mask, of="token")
    assert (weights[mask] <= 1 + 1e-4).all() and float(weights[mask].min()) < 0.5
    first = mask.int().argmax(dim=1)[:, None]
    full = rollout.sampled_logprobs.gather(1, first)  # the first token is always {, which has all the weight
    torch.testing.assert_close(weights.gather(1, first), full.exp(), atol=1e-4, rtol=1e-3)
    report = parts.updater.update(batch, [plan])
    assert rollout_metrics(report.batch, world)["rollout/logprob_abs_diff_mean"] < 1e-4


def test_weights_of_sequences_give_the_gradient_of_the_policy_without_a_grammar() -> None:
    """Over all completions of two tokens: of the reward that is 0 where a completion breaks the grammar."""
    torch.manual_seed(0)
    first = torch.randn(4, requires_grad=True)
    second = torch.randn(4, 4, requires_grad=True)
    rewards = torch.rand(4, 4)
    allowed = [torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])]
    full = [first.log_softmax(0), second.log_softmax(1)]
    drawn = [(full[0] + allowed[0].log()).log_softmax(0), (full[1] + allowed[1].log()).log_softmax(1)]
    loss = torch.zeros(())
    for a in range(2):
        for b in (1, 2):
            logprobs = torch.stack([full[0][a], full[1][a, b]])[None]
            sampler = torch.stack([drawn[0][a], drawn[1][a, b]])[None].detach()
            ratio = sampler_ratio(logprobs.detach(), sampler_logprobs=sampler, mask=torch.ones(1, 2), of="sequence")
            weights = correction_weights(ratio, how="truncate", clip=2.0, low=0.5)
            loss = loss + sampler.sum().exp() * rewards[a, b] * (weights * logprobs).sum()
    found = torch.autograd.grad(loss, [first, second])
    exact = full[0].softmax(0).new_zeros(())
    for a in range(2):
        for b in (1, 2):
            exact = exact + (first.log_softmax(0)[a] + second.log_softmax(1)[a, b]).exp() * rewards[a, b]
    expected = torch.autograd.grad(exact, [first, second])
    torch.testing.assert_close(found, expected)
