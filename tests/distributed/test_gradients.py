"""The gradient of a PPO update is one number a weight: ranks, ZeRO stages, micro-batches, padding and
who computes the products do not change it.

Rows as multi-turn rollouts have them: random lengths, responses that are empty, and gaps in a response where somebody
else speaks. A gradient is read off the weights after an update by AdamW with lr and eps of 10^6 each, which subtracts
it; so the whole way through the engine is compared, and by a norm over all weights.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS, AlgorithmConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig, KLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import MicroBatches, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.functional import operations
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.mini_batches import MiniBatchPlanner
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.types import Batch
from hybrid_rlhf.rl.updates.updater import Updater
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.marks import faults, slow
from tests.support.ranks import run_ranks
from tests.support.rl import rollout_of
from tests.support.tiny import tiny_scorer

SEEDS = (0, 1, 2)
TOLERANCE = 1e-5
PADDED, PACKED = "eager", "auto"
PLAIN = (0, PADDED, MicroBatches(rows=10, tokens=8192))
CUTS = (MicroBatches(rows=2, tokens=8192), MicroBatches(rows=None, tokens=24))
Case = tuple[int, str, MicroBatches]
"""ZeRO stage, attention, what passes at once."""
Task = tuple[str, int, Case]
"""Algorithm, seed of the batch, case."""
CASES: list[Case] = [
    (stage, attention, CUTS[(stage + shift) % 2])
    for stage, (shift, attention) in product(range(4), enumerate((PACKED, PADDED)))
]
TOGETHER: list[Case] = [
    (stage, PACKED, MicroBatches(rows=rows, tokens=tokens, ranks=2))
    for stage, (rows, tokens) in zip(range(4), ((2, 8192), (None, 24), (2, 8192), (None, 24)), strict=True)
]
"""Rows that pairs of ranks compute together."""
OTHERS = [name for name in ALGORITHMS if name not in ("ppo", "dr_grpo", "dapo")]
"""Those two are GRPO with other settings."""
SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "kl": KLConfig(where="loss", estimator="k3"),
    "entropy_coef": 0.1,
    "loss_normalization": "token",
    "clip": (0.9, 20.0),
    "value_clip": 0.5,
    "correction": CorrectionConfig(method="mask", clip=1.5, count_masked=False),
}
"""The loss is divided by the tokens that the correction keeps, whose number the ranks have to add up."""


def settings_of(name: str) -> AlgorithmConfig:
    """Of these settings those that an algorithm reads."""
    kind = RL_ALGORITHMS[name]
    known = {field.name for field in fields(kind)}
    return kind(**{key: value for key, value in SETTINGS.items() if key in known})


def random_batch(seed: int) -> Batch:
    """Random in everything; some responses are empty, and some have gaps."""
    chance = torch.Generator().manual_seed(seed)
    rows, prompt, response = 10, 8, 14
    time = torch.arange(prompt + response)
    starts = torch.randint(1, prompt, (rows, 1), generator=chance)
    lengths = torch.randint(0, response, (rows, 1), generator=chance)
    lengths[seed] = 0
    attention = time < starts + lengths
    answered = attention & (time >= starts) & (torch.rand(rows, len(time), generator=chance) > 0.3)

    def normal(scale: float, mean: float = 0.0) -> torch.Tensor:
        return mean + scale * torch.randn(rows, len(time), generator=chance)

    values = normal(1.0)
    old, reference = normal(0.5, -5.5), normal(0.5, -5.5)
    drawn = old + normal(0.4)
    rollout = rollout_of(
        attention,
        answered,
        input_ids=torch.randint(3, 200, attention.shape, generator=chance),
        sampled_logprobs=old,
        drawn_logprobs=drawn,
        stopped=lengths[:, 0] > 3,
        old_logprobs=old,
        ref_logprobs=reference,
        old_values=values,
    )
    batch = Batch(rollout, rewards=normal(1.0), advantages=normal(1.0), returns=values + normal(1.0))
    return replace(batch, rollout=replace(rollout, scores=normal(1.0)[:, 0]))


def gradients(
    world: World, path: str, critic_path: str, tasks: list[Task], together: str = "sequence_parallel"
) -> dict[Task, torch.Tensor]:
    """For each task the gradients of all that learns in a row, on rank 0; `together` is the key of the ranks that
    compute rows together."""
    optimizer = OptimizerConfig(lr=1e6, eps=1e6, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.0)
    found = {}
    for number, (name, seed, (stage, attention, micro)) in enumerate(tasks):
        operations._LEAST_PRODUCTS = 1 if attention == PACKED else 2**62  # oneDNN against torch's own
        model = ModelConfig(attention=attention, **{together: micro.ranks})  # type: ignore[arg-type]
        spec = EngineSpec("actor", path, model, ZeroConfig(stage=stage), 0, optimizer)  # type: ignore[arg-type]
        actor, algorithm = build_actor(spec, world), ALGORITHMS[name](settings_of(name))
        critic = (
            build_engine(replace(spec, role="critic", path=critic_path), world)
            if RL_ALGORITHMS[name].needs_critic
            else None
        )
        roles: Any = Roles(world, actor, None, critic)  # type: ignore[arg-type]
        batch, micro_batches = random_batch(seed), replace(micro, padded=attention == PADDED)
        planner = MiniBatchPlanner(micro_batches, seed=number, world=solo_world(torch.device("cpu")))
        plan = planner.plan(batch.rollout, together=algorithm.together)
        learners = roles.learners.values()
        before = [value for engine in learners for _, value in full_tensors(engine.lm, world)]
        rollout = RolloutConfig(sampling=SamplingParams(max_new_tokens=14))
        Updater(roles, algorithm, rollout=rollout).update(batch, [plan], kl_coef=0.3)
        after = [value for engine in learners for _, value in full_tensors(engine.lm, world)]
        if world.is_main:
            parts = [(a.double() - b.double()).flatten() for a, b in zip(before, after, strict=True) if a is not None]
            found[name, seed, (stage, attention, micro)] = torch.cat(parts)
    return found


@pytest.fixture(scope="module")
def critic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scorer with a head: a fresh value head is 0, and lets no gradient through to the model below."""
    folder = tmp_path_factory.mktemp("critic")
    scorer = tiny_scorer()
    assert float(scorer.score.weight.detach().abs().max()) > 0.1
    scorer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("ranks", "cases", "names"),
    [
        (2, CASES[::3], OTHERS[::5]),
        slow(2, CASES[::3], OTHERS),
        *(faults(*case, OTHERS) for case in [(1, CASES), (2, CASES), (4, CASES[1::3])]),
    ],
    ids=["2 ranks", "2 ranks, all algorithms", "1 rank", "more on 2 ranks", "4 ranks"],
)
def test_an_update_does_not_depend_on_how_it_is_cut(
    ranks: int, cases: list[Case], names: list[str], model_folder: Path, critic_folder: Path, tmp_path: Path
) -> None:
    tasks: list[Task] = [("ppo", SEEDS[(place + ranks) % len(SEEDS)], case) for place, case in enumerate(cases)]
    tasks += [(name, 0, cases[(place + ranks) % len(cases)]) for place, name in enumerate(names)]
    assert_as_on_one_rank(ranks, tmp_path, str(model_folder), str(critic_folder), tasks)


@pytest.mark.parametrize("together", ["sequence_parallel", "tensor_parallel"])
@pytest.mark.parametrize("ranks", [2, faults(4)])
def test_an_update_does_not_depend_on_ranks_that_compute_together(
    ranks: int,
    together: str,
    model_folder: Path,
    critic_folder: Path,
    tmp_path: Path,
) -> None:
    """Two ranks compute all rows together; of four, two pairs compute rows of their own."""
    tasks: list[Task] = [(name, 0, case) for name, case in product(("ppo", "grpo"), TOGETHER)]
    assert_as_on_one_rank(ranks, tmp_path, str(model_folder), str(critic_folder), tasks, together)


def assert_as_on_one_rank(ranks: int, folder: Path, model: str, critic: str, tasks: list[Task], *more: str) -> None:
    """Compare gradients with those of one rank without ZeRO, of padded rows in one micro-batch."""
    plain = list(dict.fromkeys((name, seed, PLAIN) for name, seed, _ in tasks))
    expected = run_ranks(gradients, 1, folder / "plain", model, critic, plain)[0]
    found = run_ranks(gradients, ranks, folder / "ranks", model, critic, tasks, *more)[0]
    assert len(found) == len(tasks)
    for (name, seed, case), gradient in found.items():
        reference = expected[name, seed, PLAIN]
        size = float(reference.norm())
        assert size > 0.1, name
        error = float((gradient - reference).norm()) / size
        assert error < TOLERANCE, (name, case, seed, error)
