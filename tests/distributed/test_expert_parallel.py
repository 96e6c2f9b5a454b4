"""Ranks that split the experts of each layer train, sample and save the model that one rank with all experts does."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.placement import read_placement
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import CheckpointConfig
from hybrid_rlhf.engines import builder
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.engines.saved.checkpoints import CheckpointWriter, LoopState, load_checkpoint
from hybrid_rlhf.engines.saved.training_state import TrainingState
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.models.expert_parallel import expert_layers, require_expert_parallelism, split_experts
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.models.weight_split import split_of
from hybrid_rlhf.planning.shapes import shaped_model
from hybrid_rlhf.rl.roles.placing import _require_all_ranks
from hybrid_rlhf.runtime.placement import Placement, RolePlacement
from hybrid_rlhf.runtime.world import World
from tests.support.commands import CommandLine
from tests.support.engines import PROMPTS, actor_spec
from tests.support.errors import refused, user_error
from tests.support.families import EXPERT_VARIANTS, variant
from tests.support.faults import Point, run_step
from tests.support.marks import faults, slow
from tests.support.ranks import run_main, run_ranks
from tests.support.steps import MODULES, run_outputs, step_line
from tests.support.tiny import save_tiny, tiny_tokenizer

UPDATES = 3
BACKENDS: tuple[Literal["auto", "module"], ...] = ("auto", "module")
Case = dict[str, Any]
"""Settings of `actor_spec`, and the number of ranks that split experts as `experts`."""


def spec_of(path: Path, experts: int = 1, checkpointing: bool = False, **settings: Any) -> EngineSpec:
    """An actor whose gradient is clipped in each update."""
    spec = actor_spec(path, **settings)
    assert spec.optimizer is not None
    model = replace(spec.model, expert_parallel=experts, gradient_checkpointing=checkpointing, router_aux_loss_coef=0.1)
    return replace(spec, model=model, optimizer=replace(spec.optimizer, lr=1e-3, max_grad_norm=0.05))


def update(engine: HybridEngine, world: World) -> tuple[float, float]:
    """One update on seven rows of different lengths; the loss of all ranks and the gradient's norm. A rank with fewer
    rows than others has a micro-batch without a loss."""
    ids = torch.randint(3, 200, (7, 12), generator=torch.Generator().manual_seed(engine.weight_version))
    real = torch.arange(12) < torch.tensor([12, 9, 4, 11, 2, 7, 12])[:, None]
    rows: list[int | None] = [*range(world.rank, len(ids), world.size)]
    rows += [None] * (-(-len(ids) // world.size) - len(rows))
    total = 0.0
    for row in rows:
        part = slice(row or 0, (row or 0) + 1)
        mask = real[part] if row is not None else torch.arange(12)[None] < 1
        wanted = mask & (torch.arange(12) > 0)
        logprobs, _ = engine(ids[part], mask, wanted)
        loss = engine.with_router_losses(sft_loss(logprobs, mask=wanted), wanted.sum(dim=1).float())
        engine.backward(loss.total, count=50)
        total += float(loss.total.detach())
    norm = engine.step().grad_norm
    assert norm is not None
    return float(world.all_reduce(torch.tensor(total))), norm


def trained(world: World, path: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """Losses, gradient norms and whole weights of each case after some updates."""
    results = []
    for case in cases:
        engine = build_actor(spec_of(path, **case), world)
        updates = [update(engine, world) for _ in range(UPDATES)]
        held = sum(weight.numel() for weight in engine.lm.parameters())
        weights = {name: tensor for name, tensor in full_tensors(engine.lm, world) if tensor is not None}
        results.append({"updates": updates, "weights": weights, "operations": engine.operations, "held": held})
    return results


def planned(path: Path, experts: int) -> int:
    """Weights that a rank has by the memory plan."""
    model = ModelConfig(expert_parallel=experts)
    shapes = shaped_model(str(path), "causal_lm", config=model, dtype=torch.float32, lora=None, learns=True)
    assert shapes.local.all < shapes.elements.all
    return shapes.local.all


@pytest.fixture(scope="module", params=["qwen3_moe", faults("mixtral")])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random mixture of experts."""
    return save_tiny(tmp_path_factory.mktemp(request.param), variant(request.param))


SHARDED: list[Case] = [{"stage": stage, "experts": 2} for stage in range(4)]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [{**SHARDED[3], "checkpointing": True}]),
        faults(2, [*SHARDED, {**SHARDED[2], "checkpointing": True}]),
        faults(4, SHARDED),
    ],
    ids=["2 ranks", "2 ranks, other stages", "4 ranks"],
)
def test_split_experts_train_as_whole_ones(mixture: Path, tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    """Catches gradients of experts that are averaged, summed, clipped or counted other than those of dense weights."""
    expected = run_ranks(trained, 1, tmp_path / "one", mixture, [{}])[0][0]
    for case, result in zip(cases, run_ranks(trained, ranks, tmp_path / "split", mixture, cases)[0], strict=True):
        torch.testing.assert_close(
            torch.tensor(result["updates"]), torch.tensor(expected["updates"]), atol=1e-5, rtol=1e-5
        )
        assert result["operations"] == expected["operations"], case
        if case["stage"] < 3:
            assert result["held"] == planned(mixture, case["experts"]), "what the plan counts"
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=f"{name} {case}")


def written(world: World, path: Path, folder: Path, case: Case) -> list[tuple[float, float]]:
    """Two updates and a checkpoint; the losses and norms of the next two."""
    engine = build_actor(spec_of(path, **case), world)
    average = WeightAverage(engine.module, decay=0.5)
    for _ in range(2):
        update(engine, world)
        average.update()
    writer = CheckpointWriter(folder, {"actor": TrainingState(engine, average)}, world, CheckpointConfig())
    writer.save(LoopState(2, {}))
    writer.finish()
    return [update(engine, world) for _ in range(2)]


def resumed(world: World, path: Path, folder: Path, case: Case) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """What a checkpoint goes on with, and the moving average in it."""
    engine = build_actor(spec_of(path, **case), world)
    average = WeightAverage(engine.module, decay=0.5)
    load_checkpoint(folder / "checkpoints" / "step_2", states={"actor": TrainingState(engine, average)}, world=world)
    with average.applied():
        averages = {name: tensor for name, tensor in full_tensors(engine.lm, world) if tensor is not None}
    return [update(engine, world) for _ in range(2)], averages


@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        ((2, {"stage": 3, "experts": 2}), (1, {"stage": 0})),
        faults((2, {"stage": 2, "experts": 2}), (2, {"stage": 3})),
        faults((2, {"stage": 1, "experts": 2, "dtype": "bfloat16"}), (1, {"stage": 1, "dtype": "bfloat16"})),
        ((1, {"stage": 0}), (2, {"stage": 0, "experts": 2})),
        faults((2, {"stage": 1}), (4, {"stage": 3, "experts": 2})),
        faults((4, {"stage": 2, "experts": 2}), (4, {"stage": 2, "experts": 4})),
        faults((4, {"stage": 0, "experts": 2}), (2, {"stage": 1, "experts": 2})),
    ],
    ids=str,
)
def test_a_checkpoint_resumes_with_other_ranks_per_expert(
    writes: tuple[int, Case], reads: tuple[int, Case], mixtral: Path, tmp_path: Path
) -> None:
    """Catches experts that a checkpoint stores or reads at the place of others, or not at all."""
    run = tmp_path / "run"
    expected = run_ranks(written, writes[0], tmp_path / "written", mixtral, run, writes[1])[0]
    same, averages = run_ranks(resumed, writes[0], tmp_path / "same", mixtral, run, writes[1])[0]
    assert same == expected
    other, other_averages = run_ranks(resumed, reads[0], tmp_path / "other", mixtral, run, reads[1])[0]
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if writes[1].get("dtype") != "bfloat16" else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(torch.tensor(other), torch.tensor(expected), **tolerance)
    for name, value in averages.items():
        assert torch.equal(other_averages[name], value), name


def sampled(world: World, path: Path, folder: Path, stages: list[int], experts: int) -> list[dict[str, Any]]:
    """By stage and backend: completions of different prompts on each rank before and after an update, and the weights
    of a saved model."""
    found = []
    for stage, backend in product(stages, BACKENDS):
        rollout = RolloutConfig(backend=backend)
        engine = build_actor(spec_of(path, experts, stage=stage), world, rollout=rollout)
        completions = []
        for _ in range(2):
            with engine.inference(stop_token_ids=()) as generation:
                samples = generation.generate(PROMPTS[world.rank :], SamplingParams(max_new_tokens=6, temperature=0.0))
            completions += [sample[0] for sample in samples]
            update(engine, world)
        update(engine, world)
        save_model(folder, full_tensors(engine.lm, world), lm=engine.lm, tokenizer=tiny_tokenizer(), world=world)
        tokens, logprobs = zip(*((c.token_ids, c.logprobs) for c in completions), strict=True)
        weights = AutoModelForCausalLM.from_pretrained(folder).state_dict() if world.is_main else {}
        found.append({"tokens": [*tokens], "logprobs": torch.tensor(logprobs), "weights": weights})
    return found


@pytest.mark.slow
def test_split_experts_sample_and_are_saved_as_whole_ones(mixture: Path, tmp_path: Path) -> None:
    """Catches inference weights and folders with the experts of one rank, or in another order."""
    (whole,) = run_ranks(sampled, 1, tmp_path / "one", mixture, tmp_path / "whole", [0], 1)
    first, second = run_ranks(sampled, 2, tmp_path / "two", mixture, tmp_path / "split", [2, 3], 2)
    assert len(first) == 4
    for expected, found, other in zip([*whole, *whole], first, second, strict=True):
        assert found["tokens"] == expected["tokens"]
        torch.testing.assert_close(found["logprobs"], expected["logprobs"], atol=1e-4, rtol=1e-4)
        assert other["tokens"] == [*expected["tokens"][1:3], *expected["tokens"][4:]]
        torch.testing.assert_close(found["weights"], expected["weights"], atol=1e-5, rtol=1e-5)


def split_all(world: World, names: list[str]) -> dict[str, tuple[float, float]]:
    """The largest relative errors of outputs and of gradients of this rank's experts, by variant of a family."""
    errors = {}
    ids = torch.randint(3, 200, (world.size, 3, 9), generator=torch.Generator().manual_seed(0))
    for name in names:
        whole = variant(name)
        split = variant(name)
        require_expert_parallelism(split, world.size, ranks=world.size)
        for layer in expert_layers(split):
            split_experts(layer, world, lambda weight: nn.Parameter(split_of(weight).local(weight.detach()).clone()))
        output = split(ids[world.rank]).logits
        output.square().mean().backward()
        expected = [whole(rows).logits for rows in ids]
        torch.stack(expected).square().mean(dim=(1, 2, 3)).sum().backward()
        grads = [
            (weight.grad, split_of(weight).local(other.grad))
            for weight, other in zip(split.parameters(), whole.parameters(), strict=True)
            if split_of(weight).parts > 1 and weight.grad is not None and other.grad is not None
        ]
        assert grads
        errors[name] = (
            relative_error(output.detach(), expected[world.rank].detach()),
            max(relative_error(found, wanted) for found, wanted in grads),
        )
    return errors


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
def test_every_family_with_stacked_experts_can_split_them(tmp_path: Path) -> None:
    """Catches a family whose experts transformers computes in another way than those of Qwen3 and Mixtral."""
    stacked = [name for name in EXPERT_VARIANTS if "llama4" not in name]
    for errors in run_ranks(split_all, 2, tmp_path, stacked):
        for name, (output, grad) in errors.items():
            assert output < 1e-5 and grad < 1e-5, name
    with user_error("experts transformers stacks in one weight, Llama4ForCausalLM has none"):
        require_expert_parallelism(variant("llama4"), 2, ranks=2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--model.expert_parallel 3", "must divide the number of experts, MixtralForCausalLM has 4, got 3"),
        ("--model.expert_parallel 2", "must divide the number of ranks 1, got 2"),
        (
            "--model.expert_parallel 2 --model.sequence_parallel 2",
            "got model.sequence_parallel 2 and model.expert",
        ),
        ("--model.expert_parallel 2 --model.quantization nf4 --lora.rank 4", "got model.quantization nf4"),
    ],
)
def test_what_split_experts_do_not_support_ends_a_run_before_a_model_is_loaded(
    more: str,
    message: str,
    mixtral: Path,
    pair_rows: Path,
    tmp_path: Path,
    cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(builder, "load_model")
    ended = cli(["sft", *step_line("sft", tmp_path / "run", mixtral, pair_rows, more)])
    assert ended.code == 2 and message in ended.err


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lora": LoraConfig()}, "trains no adapters of experts, got lora.target_modules all-linear"),
    (
        {"deepspeed_overrides": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}},
        "got zero_hpz_partition_size 2 in deepspeed_config",
    ),
    ({"path": "dense"}, "whose experts transformers stacks in one weight, LlamaForCausalLM has none"),
]


def refusals(world: World, path: Path, dense: Path) -> list[str]:
    """The errors of engines with each of REFUSED."""
    specs = [replace(spec_of(path, experts=2), **settings) for settings, _ in REFUSED]
    specs[-1] = replace(specs[-1], path=str(dense))
    return [refused(build_engine, spec, world) for spec in specs]


def test_an_engine_refuses_what_split_experts_do_not_support(mixtral: Path, model_folder: Path, tmp_path: Path) -> None:
    (errors, _) = run_ranks(refusals, 2, tmp_path, mixtral, model_folder)
    assert all(message in error for error, (_, message) in zip(errors, REFUSED, strict=True)), errors


def test_split_experts_need_all_roles_on_all_ranks() -> None:
    for style in ("separation", "auto"):
        with user_error(f"needs all roles on all ranks, got placement {style}"):
            RLConfig(model=ModelConfig(expert_parallel=2), placement=read_placement(style))
    alone = {"reference": RolePlacement((1,))}
    _require_all_ranks(Placement(alone, "interleaving"), 1, ranks=2)
    with user_error("needs all roles on all 2 ranks, reference has 1: leave"):
        _require_all_ranks(Placement(alone, "interleaving"), 2, ranks=2)


GRPO = "--algorithm grpo --rollout.sampling.n 4 --ptx null --algorithm.kl.target null --algorithm.score_scaling none"
STEPS = {
    "sft": "",
    "reward": "",
    "ppo": "--actor.zero.stage 2 --critic.zero.stage 3",
    "grpo": f"{GRPO} --rollout.routing_replay true --model.router_aux_loss_coef 0.01",
    "adapters": (
        "--actor.lora.rank 4 --actor.lora.target_modules [q_proj,v_proj] --critic.share_base true --actor.zero.stage 2"
    ),
    "tensor parallel": f"{GRPO} --actor.zero.stage 2 --rollout.tensor_parallel 2",
    "lag": f"{GRPO} --actor.zero.stage 3 --rollout.max_lag 1",
}
"""Steps with more options: PPO has a mixture as critic, a moving average, and a reference that follows the actor."""


def line_of(step: str, output: Path, model: Path, rows: Path, *more: str) -> tuple[str, list[str]]:
    """The module and the command line of a step."""
    name = step if step in MODULES else "ppo"
    return MODULES[name], step_line(name, output, model, rows, STEPS[step], *more)


def stage_of(step: str, stage: int) -> str:
    """The option that sets the ZeRO stage of the trained model; PPO has its own."""
    own = {"grpo": "actor.zero", "sft": "zero", "reward": "zero"}
    return f"--{own[step]}.stage {stage}" if step in own else ""


@pytest.mark.parametrize(
    ("step", "stage"),
    [
        faults("grpo", 2),
        faults("grpo", 3),
        faults("sft", 2),
        faults("sft", 3),
        slow("ppo", 2),
        *(faults(*case) for case in [("reward", 2), ("adapters", 2), ("tensor parallel", 2), ("lag", 3)]),
    ],
)
def test_a_step_does_not_depend_on_who_has_the_experts(
    step: str, stage: int, mixtral: Path, pair_rows: Path, tmp_path: Path
) -> None:
    """Catches a role, a sampler or a loss that the engines' own tests do not build."""
    own = "--rollout.tensor_parallel 1" if step == "tensor parallel" else ""
    module, line = line_of(step, tmp_path / "whole", mixtral, pair_rows, own)
    run_main(module, 1, line)
    more = f"--model.expert_parallel 2 {stage_of(step, stage)}"
    module, line = line_of(step, tmp_path / "split", mixtral, pair_rows, more)
    run_main(module, 2, line)
    whole, split = (run_outputs(tmp_path / name)["metrics"] for name in ("whole", "split"))
    for expected, found in zip(whole, split, strict=True):
        common = [name for name in expected if not name.startswith(("train/", "rollout/prompts"))]
        assert {name: found[name] for name in common} == pytest.approx(
            {name: expected[name] for name in common}, abs=1e-4, rel=1e-4
        ), expected["step"]


@pytest.mark.parametrize(
    ("step", "stage"),
    [
        faults("sft", 3),
        *(faults(*case) for case in (("sft", 2), ("grpo", 3), ("ppo", 2))),
        slow("grpo", 2),
    ],
)
def test_a_killed_run_with_split_experts_ends_bit_for_bit(
    step: str, stage: int, mixtral: Path, pair_rows: Path, tmp_path: Path
) -> None:
    split = f"--model.expert_parallel 2 {stage_of(step, stage)}"
    module, line = line_of(step, tmp_path / "whole", mixtral, pair_rows, split)
    assert run_step(module, 2, line) == [0, 0]
    module, line = line_of(step, tmp_path / "killed", mixtral, pair_rows, split)
    point = Point("hybrid_rlhf.engines.engine:ModelEngine.step", 5, 1)
    assert -signal.SIGKILL in run_step(module, 2, line, point)
    assert run_step(module, 2, [*line, "--resume", "auto"]) == [0, 0]
    assert run_outputs(tmp_path / "killed") == run_outputs(tmp_path / "whole")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Mixtral, with four experts."""
    return save_tiny(tmp_path_factory.mktemp("mixtral"), variant("mixtral"))
