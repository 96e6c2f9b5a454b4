"""What a pass does between its first and its last kernel, with the meta device in place of a GPU: operations whose
shape or result the host has to wait for cannot run there, and copies to and from it can be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.configs.preference import DPOConfig, KTOConfig
from hybrid_rlhf.configs.reward import RewardObjectiveConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig, KLConfig
from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.transfers import joined
from hybrid_rlhf.loop.loss_sums import RunningSums
from hybrid_rlhf.models.packing import attention, batches, use_packing
from hybrid_rlhf.models.policy import Policy, Scorer, values_before
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.mini_batches import MiniBatchPlanner
from hybrid_rlhf.rl.rollouts.scoring import _Reading
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.rl.updates.policy_loss import MiniBatch, PolicyLoss
from hybrid_rlhf.rl.updates.updater import LastLogprobs, Updater
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import solo_world
from hybrid_rlhf.supervised.objectives.reward_labels import RewardLabelObjective
from hybrid_rlhf.supervised.objectives.reward_pairs import RewardPairObjective
from hybrid_rlhf.supervised.objectives.sft import SFTObjective
from hybrid_rlhf.supervised.preference.dpo import DPO
from hybrid_rlhf.supervised.preference.kto import KTO
from hybrid_rlhf.supervised.preference.objectives import PreferenceLabelObjective, PreferencePairObjective
from tests.support.models import build_model, rows_that_begin_alike
from tests.support.rl import rollout_of

CPU = solo_world(torch.device("cpu"))
META = torch.device("meta")
WAITS = {"nonzero", "masked_select", "masked_scatter_backward", "_local_scalar_dense", "bincount", "unique"}


class OnDevice(TorchDispatchMode):
    """Counts copies between host and device, and what a GPU would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in given if tensor.is_meta]
        if name == "_to_copy" and here and kwargs.get("device", META).type == "cpu":
            self.counts["fetches"] += 1
            return torch.zeros(here[0].shape, dtype=kwargs.get("dtype") or here[0].dtype)
        if name == "_to_copy" and not here and kwargs.get("device") == META:
            self.counts["copies"] += 1
        elif here:
            is_flag = [tensor.dtype is torch.bool for tensor in given[1:]]
            waits = name in WAITS or (name.startswith("index") and "index_" not in name and any(is_flag))
            # a scalar of the host is an argument of a kernel
            waits |= any(not tensor.is_meta and tensor.dim() for tensor in given)
            self.counts[name] += waits
        return func(*args, **kwargs)


class OnMeta:
    """A role's model on the device."""

    tensor_parallel = 1
    reports_rows = True
    shares_prefixes = True
    router_agreement = None
    world = CPU
    device = META

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, device=META, **options)

    def with_router_losses(self, loss: LossSum, weights: Tensor) -> LossSum:
        assert weights.is_meta
        return loss


def kernel(query: Tensor, key: Tensor, value: Tensor, ends: Any, longest: Any, **_: Any) -> Tensor:
    """In place of a varlen kernel."""
    assert all(end.is_meta for end in ends) and all(isinstance(length, int) for length in longest)
    return query * (key * value).sum()


@pytest.fixture(params=["varlen", "in groups", "padded"])
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OnMeta, OnMeta]]:
    """Actor and critic, whose rows are packed, or not."""
    monkeypatch.setitem(batches._MIN_SAVING, "meta", 1)
    lm = build_model("llama")
    classifier = build_model("llama", AutoModelForSequenceClassification, num_labels=1)
    for model in (lm, classifier):
        if request.param == "padded":
            model.set_attn_implementation("eager")  # transformers waits once for a mask of sdpa
        else:
            use_packing(model)
        model.to(META)  # type: ignore[arg-type]
    if request.param == "varlen":
        for module in (attention, batches):
            monkeypatch.setattr(module, "varlen_attention", lambda *_: kernel)
    yield OnMeta(Policy(lm)), OnMeta(Scorer(classifier))


def batch_of_rows() -> Batch:
    """Rows of which some begin alike, and an empty one, with all that a loss may read."""
    ids, mask = rows_that_begin_alike()
    response = mask & (torch.arange(ids.shape[1]) > 35)
    values = torch.rand(ids.shape)
    names = ("sampled_logprobs", "old_logprobs", "ref_logprobs", "old_values", "turn_rewards")
    rollout = rollout_of(mask, response, input_ids=ids, **dict.fromkeys(names, values))
    rollout = replace(rollout, scores=values[:, 0], penalties=values[:, 0])
    return Batch(rollout, values, values, values, selected=values > 0.5).rows([0, 1, 2, 3, 4, 5, 6, None])


def waits(counter: OnDevice) -> dict[str, int]:
    return {name: count for name, count in counter.counts.items() if count and name not in ("copies", "fetches")}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_update_waits_for_nothing_and_makes_two_copies(name: str, models: tuple[OnMeta, OnMeta]) -> None:
    """One before the forward, with what the model reads, and one after it, with what the loss reads."""
    actor, critic = models
    config = parse_config(RLConfig, ["--algorithm", name]).algorithm
    kl = KLConfig(coef=0.1, where="loss", estimator="k3") if getattr(config, "kl", None) else None
    settings: dict[str, Any] = {"entropy_coef": 0.1, "kl": kl, "correction": CorrectionConfig()}
    known = {key: value for key, value in settings.items() if hasattr(config, key) and value is not None}
    algorithm = ALGORITHMS[name](replace(config, **known) if name not in ("online_dpo", "raft") else config)
    loss_of: Any = PolicyLoss(actor, algorithm, temperature=0.7, max_tokens=9)  # type: ignore[arg-type]
    batch, sums, last = batch_of_rows(), RunningSums(META), LastLogprobs()
    with OnDevice() as counter:
        loss, current = loss_of(batch, MiniBatch(tokens=9.0, sequences=3.0, kl_coef=0.1))
        (loss.total / 9.0).backward()
        sums.add(loss)
        last.add([*range(7), None], current, batch.lengths)
    assert waits(counter) == {}
    assert (counter.counts["copies"], counter.counts["fetches"]) == (2, 0)
    updater: Any = Updater.__new__(Updater)
    updater._algorithm, updater._roles = algorithm, SimpleNamespace(images_of=lambda rollout: None)
    if algorithm.value_clip is not None:
        with OnDevice() as counter:
            updater.value_loss(critic, batch).total.backward()
        assert waits(counter) == {} and counter.counts == Counter(copies=2)


def test_scoring_copies_once_for_a_micro_batch_and_fetches_once_for_all(models: tuple[OnMeta, OnMeta]) -> None:
    actor, critic = models
    rollout: Rollout = batch_of_rows().rollout
    plan = MiniBatchPlanner(MicroBatches(tokens=120), seed=0, world=CPU).plan(rollout)
    reading: Any = _Reading(plan, rollout, [actor, critic])  # type: ignore[list-item]
    parts = len(reading._numbers(actor))
    assert parts > 1
    with torch.no_grad(), OnDevice() as counter:
        found = reading.values(
            actor,
            lambda rows: actor(rows.input_ids, rows.attention_mask, rows.response_mask, 0.7),
            "old_logprobs",
            "entropy",
        )
        found |= reading.values(
            critic, lambda rows: (values_before(critic(rows.input_ids, rows.attention_mask)),), "old_values"
        )
    assert waits(counter) == {} and counter.counts == Counter(copies=2 * parts, fetches=2)
    for of_rows in found.values():
        assert [len(of_rows[row]) for row in range(len(rollout))] == plan.index.lengths.tolist()


ROW = {"responses": [[5, 6, 7, 8], [5, 6, 9], [5, 6, 4, 4, 4]], "masks": [[False, False, True, True]] * 3}
ROW |= {"masks": [[place > 1 for place in range(len(ids))] for ids in ROW["responses"]]}  # type: ignore[arg-type]
PAIRS = {**ROW, "pairs": [(0, 1), (2, 1)], "margins": [0.1, 0.2]}
OBJECTIVES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "sft": (SFTObjective, {"input_ids": [5, 6, 7, 8], "loss_mask": [False, False, True, True]}, 2),
    "dpo": (partial(PreferencePairObjective, DPO(DPOConfig())), PAIRS, 2),
    "kto": (partial(PreferenceLabelObjective, KTO(KTOConfig())), {**ROW, "labels": [True, False]}, 2),
    "pairs": (partial(RewardPairObjective, RewardObjectiveConfig()), PAIRS, 3),
    "lists": (partial(RewardPairObjective, RewardObjectiveConfig(loss="listwise")), PAIRS, 3),
    "labels": (partial(RewardLabelObjective, RewardObjectiveConfig()), {**ROW, "labels": [1.0, 0.0, 1.0]}, 2),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_update_of_supervised_training_waits_for_nothing(name: str, models: tuple[OnMeta, OnMeta]) -> None:
    """A reward model has a third copy, with the last tokens of the rows."""
    kind, row, copies = OBJECTIVES[name]
    objective = kind(pad_token_id=0, device=META)
    engine: Any = models[name in ("pairs", "lists", "labels")]
    batch = objective.collate([row, None])
    if name == "kto":
        objective.prepare(engine, [batch])
    with OnDevice() as counter:
        objective.loss(engine, batch).total.backward()
    assert waits(counter) == {} and counter.counts == Counter(copies=copies)


def test_tensors_of_one_copy_are_those_that_were_joined() -> None:
    """Dtypes of 1 to 8 bytes, none, scalars, and parts of others."""
    tensors = [torch.arange(5), torch.tensor([True, False, True]), torch.zeros(0, 3), torch.tensor(2.5)]
    tensors += [torch.arange(6, dtype=torch.int32).view(2, 3).t(), torch.randn(3, 4).bfloat16()[:, 1:]]
    whole, views = joined(tensors)
    for one, other in zip(views(whole.clone()), tensors, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
