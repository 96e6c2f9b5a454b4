"""The memory plan against what steps then hold: bytes of live tensors on a CPU, over two steps of two micro-batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_rlhf.cli.machine.plan import planner_of
from hybrid_rlhf.cli.train import step_config
from hybrid_rlhf.configs.pipeline import PlanConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.generated_evaluation import GeneratedEvaluationConfig
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import MicroBatches, ZeroConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.functional.distillation import DistillationRule
from hybrid_rlhf.functional.logprobs import head_chunk_tokens
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.models.packing import saved_rows
from hybrid_rlhf.models.policy import Policy, TeacherTargets
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.job import read_job
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.planning.phase_memory import PhaseMemory, micro_batch
from hybrid_rlhf.planning.shapes import BatchShape, ShapedModel, shaped_model
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.rl.algorithms.ppo import PPO
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.rewards import Reward
from hybrid_rlhf.rl.rewards.models import ModelReward
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World
from hybrid_rlhf.supervised.objectives.distillation import DistillObjective
from tests.support.errors import user_error
from tests.support.marks import faults, slow
from tests.support.model_types import tiny_of_type
from tests.support.tiny import tiny_model, tiny_tokenizer

CPU = Device(torch.device("cpu"), 1, 64 * 2**30)
LEARNS = "optimizer.lr 1e-5", "optimizer.warmup_fraction 0"
MUON = "--optimizer.name muon --optimizer.max_grad_norm 0"
SFT = {
    "activations on the host": "--model.gradient_checkpointing true --model.activation_offload true",
    "4 bits": "--lora.rank 8 --model.quantization nf4",
    "zero 3": "--zero.stage 3",
    "bfloat16": "--model.dtype bfloat16",
    "bfloat16, lora": "--model.dtype bfloat16 --lora.rank 8",
    "bfloat16, zero 2": "--model.dtype bfloat16 --zero.stage 2",
    "bfloat16, zero 3": "--model.dtype bfloat16 --zero.stage 3",
    "bfloat16, zero 2, muon": f"--model.dtype bfloat16 --zero.stage 2 {MUON}",
    "bfloat16, zero 3, muon": f"--model.dtype bfloat16 --zero.stage 3 {MUON}",
    "zero 3, muon": f"--zero.stage 3 {MUON}",
    "bfloat16, muon": f"--model.dtype bfloat16 {MUON}",
    "zero 1, muon": f"--zero.stage 1 {MUON}",
}
"""Distillation and PPO have the plain step, checkpointing, adapters, and ZeRO 2 in float32."""
MORE_SFT = ("bfloat16, zero 2, muon", "bfloat16, muon")
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
PPO_CASES = {
    "plain": "",
    "one base, frozen on the host": "--actor.lora.rank 8 --critic.share_base true --rollout.offload_frozen true",
    "4 bits": "--actor.lora.rank 8 --model.quantization nf4",
    "zero 3, lora": "--actor.zero.stage 3 --actor.lora.rank 8",
    "zero 2, checkpointing": "--actor.zero.stage 2 --model.gradient_checkpointing true",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plan")
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "vocab_size": 4096}
    tiny_model(max_position_embeddings=1024, initializer_range=0.02, **shape).save_pretrained(folder / "model")
    # DeepSpeed's bucket of 2 GB would be all there is to see.
    (folder / "ds.json").write_text('{"zero_optimization": {"reduce_bucket_size": 1000000}}')
    return str(folder / "model")


def config_of(kind: Any, model: str, more: str) -> Any:
    """A config from its line, with small buckets of DeepSpeed where ZeRO shards."""
    line = f"--model.path {model} {more}"
    if ".stage" in line:
        line += f" --deepspeed_config {Path(model).parent}/ds.json"
    return parse_config(kind, line.split())


def sft(model: str, more: str, length: int, *, rows: int = 4) -> SFTConfig:
    """SFT with so many rows of a length in a micro-batch."""
    line = " ".join(f"--{setting}" for setting in LEARNS)
    line += f" --train.global_batch_size 8 --data.max_length {length} --train.micro_batch_tokens {rows * length}"
    config: SFTConfig = config_of(SFTConfig, model, f"{line} {more}")
    return config


def ppo(model: str, more: str) -> RLConfig:
    """PPO with a reward model of that size."""
    line = " ".join(f"--{role}.{setting}" for role in ("actor", "critic") for setting in LEARNS)
    config: RLConfig = config_of(RLConfig, model, f"{line} --reward.components [{model}] {more}")
    return config


def spec(role: Any, model: str, config: Any, section: Any) -> EngineSpec:
    overrides = read_overrides(config.deepspeed_config)
    if section is None:
        return EngineSpec(role, model, config.model, ZeroConfig(stage=0), 0, deepspeed_overrides=overrides)
    return EngineSpec(role, model, config.model, section.zero, 0, section.optimizer, section.lora, 10, overrides)


def counted(counter: LiveBytes, *engines: Any) -> None:
    """Weights that no operation made: they are mapped from a file."""
    for engine in engines:
        for parameter in engine.module.parameters():
            counter.count(parameter.detach())


def near(phase: PhaseMemory, measured: float) -> None:
    ratio = phase.total / measured
    assert 0.95 <= ratio <= 1.1, f"{phase}: {ratio:.3f} of {measured / 1e6:.1f} MB"


def peak_of_sft(model: str, config: SFTConfig, length: int, world: World) -> float:
    """Bytes that are alive at most in updates of rows of maximum length."""
    counter = LiveBytes("cpu")
    with counter:
        engine = build_engine(spec("actor", model, config, config), world)
        counted(counter, engine)
        counter.restart()
        ids = torch.randint(3, engine.lm.config.vocab_size, (4, length))
        mask = torch.ones_like(ids, dtype=torch.bool)
        for _ in range(2):
            for _ in range(2):
                loss = sft_loss(engine(ids, mask, mask)[0], mask=mask)
                engine.backward(loss.total, count=100.0)
                del loss
            engine.step()
    return float(counter.peak)


@pytest.mark.parametrize("name", [faults(name) if name in MORE_SFT else name for name in SFT])
def test_sft_training_holds_what_was_planned(name: str, model: str, world: World) -> None:
    length = 16 if "muon" in name or "bfloat16" in name else 96
    config = sft(model, SFT[name], length)
    (phase,) = Planner(CPU).phases(config)
    near(phase, peak_of_sft(model, config, length, world))


def test_a_model_of_7b_fits_one_gpu_with_moments_in_8_bits(tmp_path: Path) -> None:
    """In float32 without master weights: 4 bytes of a weight, 4 of its gradient and 2 of its moments. In bfloat16 there
    are 12 with the master weights, too many for 80 GB."""
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    shape = AutoConfig.for_model("qwen2", vocab_size=152064, num_key_value_heads=4, tie_word_embeddings=False, **sizes)
    shape.save_pretrained(tmp_path)
    weights = 7.616e9  # Qwen2.5-7B
    gpu = Device(torch.device("cuda"), 1, 79 * 2**30)
    for optimizer, dtype, per_weight, fits in (
        ("adamw_8bit", "float32", 4 + 4 + 2 + 8 / 256, True),
        ("adamw", "float32", 4 + 4 + 8, False),
        ("adamw_8bit", "bfloat16", 2 + 4 + 4 + 2 + 8 / 256, False),
        ("adamw", "bfloat16", 2 + 4 + 4 + 8, False),
    ):
        line = f"--optimizer.name {optimizer} --model.dtype {dtype} --model.gradient_checkpointing true"
        config = parse_config(SFTConfig, f"--model.path {tmp_path} --train.micro_batch_tokens 2048 {line}".split())
        (phase,) = Planner(gpu).phases(config)
        assert phase.total == pytest.approx(per_weight * weights, rel=0.1), (optimizer, dtype)
        assert phase.fits == fits, (optimizer, dtype)


@pytest.mark.parametrize(
    ("model_type", "settings", "more"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}, ""),
        ("qwen3_moe", {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}, "--lora.rank 8"),
        ("deepseek_v3", {"first_k_dense_replace": 1, "moe_intermediate_size": 64, **GROUPS, **LATENT}, ""),
    ],
)
def test_experts_and_latent_attention_hold_what_was_planned(
    model_type: str, settings: dict[str, Any], more: str, tmp_path: Path, world: World
) -> None:
    """In float32, in which torch has no shape rule for grouped products, and with values narrower than keys; adapters
    of stacked experts ended the plan with an error of torch."""
    more_sizes = {"num_hidden_layers": 5, "num_key_value_heads": 4, "max_position_embeddings": 128}
    shape = AutoConfig.for_model(model_type, **SIZES, **more_sizes, **settings)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    config = sft(str(tmp_path), f"--model.dtype float32 {more}", 96)
    (phase,) = Planner(CPU).phases(config)
    near(phase, peak_of_sft(str(tmp_path), config, 96, world))


def shaped(folder: Path | str, lora: LoraConfig | None = None, **settings: Any) -> ShapedModel:
    config = ModelConfig(path=str(folder), dtype="float32", **settings)
    return shaped_model(str(folder), "causal_lm", config=config, dtype=torch.float32, lora=lora, learns=True)


def test_shared_prompts_hold_what_was_planned(model: str) -> None:
    """Completions that share a prompt add their own tokens, and copies of its keys."""
    job = read_job(
        config_of(
            RLConfig,
            model,
            "--algorithm grpo --algorithm.mini_batches 1 --rollout.prompts_per_step 8 --rollout.sampling.n 6 "
            "--rollout.max_prompt_tokens 64 --rollout.sampling.max_new_tokens 16 --train.micro_batch_tokens 400 "
            f"--reward.components [{model}]",
        ),
        torch.device("cpu"),
    )
    assert job.sharing(64, 16) == 6
    batch = micro_batch(job.config.train, job.config.model, 48, 80, device="cpu", head_tokens=16, prefix=64, sharing=6)
    assert (batch.rows, batch.prefixes, batch.tokens) == (13, 3, 400), "two prompts, and a completion of a third"
    planned = shaped(model)
    lm, _ = load_model(model, "causal_lm", config=ModelConfig(path=model), dtype=torch.float32)
    policy = Policy(lm.train())
    prompts = torch.randint(3, 4000, (3, 64)).repeat_interleave(6, dim=0)
    ids = torch.cat([prompts, torch.randint(3, 4000, (18, 16))], dim=1)[:13]
    mask = torch.ones_like(ids, dtype=torch.bool)
    wanted = torch.arange(80).expand_as(ids) >= 64
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counter = LiveBytes("cpu")
    with counter:
        policy(ids, mask, wanted)[0].sum().backward()
    assert saved_rows(lm) == [64] * 10
    ratio = planned.measure(batch, backward=True).peak / counter.peak
    assert 0.95 <= ratio <= 1.1, f"{ratio:.3f} of {counter.peak / 1e6:.1f} MB"


def test_gradients_of_split_experts_are_those_of_a_rank(tmp_path: Path) -> None:
    """The gradients of all experts were counted on each rank."""
    experts = {"moe_intermediate_size": 64, "num_experts": 64, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    AutoConfig.for_model("qwen3_moe", **SIZES, **experts).save_pretrained(tmp_path)

    def peak(parts: int) -> float:
        model = shaped(tmp_path, expert_parallel=parts)
        passed = model.measure(BatchShape(1, 8, 8), backward=True)
        assert model.elements.all == sum(weight.numel() for weight in model.lm.parameters())
        return passed.peak

    largest = 4 * 64 * 128 * 128
    assert peak(1) > largest > 4 * peak(8)


def test_layers_of_a_mixture_are_alike_from_its_first_experts(tmp_path: Path) -> None:
    """The first four layers were measured, of which one has experts, and its gradients counted in each other layer."""
    experts = {"moe_intermediate_size": 256, "first_k_dense_replace": 3, **GROUPS, **LATENT, "n_routed_experts": 64}
    layers = {"num_hidden_layers": 12, "num_key_value_heads": 4}
    AutoConfig.for_model("deepseek_v3", **SIZES, **layers, **experts).save_pretrained(tmp_path)
    model = shaped(tmp_path)
    passed = model.measure(BatchShape(1, 8, 8), backward=True)
    assert passed.peak < 2 * 4 * model.elements.largest + passed.kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plan_counts_the_chunk_of_logits_of_its_device(dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits outweigh all else. Catches a chunk other than the run's, and buffers that the kernels do not have."""
    sizes = {**SIZES, "hidden_size": 16, "intermediate_size": 16, "num_key_value_heads": 4, "num_hidden_layers": 1}
    vocabulary = 20_000
    AutoConfig.for_model("llama", **{**sizes, "vocab_size": vocabulary}).save_pretrained(tmp_path)
    lm = shaped_model(str(tmp_path), "causal_lm", config=ModelConfig(), dtype=dtype, lora=None, learns=True)

    def peak(tokens: int, device: str, *, backward: bool = True) -> float:
        return lm.measure(BatchShape(1, 16384, tokens, device=device), backward=backward).peak

    chunk = head_chunk_tokens(vocabulary, device_type="cuda", dtype=dtype)
    assert chunk in (4096, 8192)
    learns = peak(16384, "cuda") - peak(256, "cuda")
    assert learns == pytest.approx((chunk - 256) * vocabulary * (4 + dtype.itemsize), rel=0.05)
    reads = peak(16384, "cuda", backward=False) - peak(256, "cuda", backward=False)
    assert reads == pytest.approx((chunk - 256) * vocabulary * 4, rel=0.05), "no gradient"
    assert peak(16384, "cpu") - peak(256, "cpu") < learns / 4, "512 tokens"


def test_the_scales_of_4_bit_weights_are_on_every_rank(model: str) -> None:
    """ZeRO-3 partitions only the 4-bit codes; the plan divided the scales by the number of ranks too."""
    line = "--lora.rank 8 --model.quantization nf4 --model.gradient_checkpointing true --zero.stage 3"
    (one,), (many,) = (Planner(replace(CPU, ranks=ranks)).phases(sft(model, line, 16)) for ranks in (1, 4096))
    scales = shaped(model, LoraConfig(rank=8), quantization="nf4").elements.four_bit / 64
    assert scales < many.need.weights < 1.2 * scales < one.need.weights / 20


def test_a_forward_that_reads_values_is_one_line(tmp_path: Path) -> None:
    tiny_of_type("bart").save_pretrained(tmp_path)
    config = SFTConfig(model=ModelConfig(path=str(tmp_path)))
    with user_error(r"runs the model on shapes alone, BartForCausalLM fails there \(.*\): leave"):
        Planner(CPU).phases(config)


@pytest.mark.parametrize("model_type", ["llama4_text", "qwen3_5_text", "bloom"])
def test_types_with_padded_rows_are_planned(model_type: str, tmp_path: Path) -> None:
    tiny_of_type(model_type).save_pretrained(tmp_path / "model")

    def planned(rows: int) -> float:
        (phase,) = Planner(CPU).phases(sft(str(tmp_path / "model"), "", 64, rows=rows))
        return phase.total

    assert planned(1) < planned(2) < planned(4)


@pytest.mark.parametrize("more", ["", faults("--lora.rank 8")])
def test_distillation_holds_no_more_than_was_planned(more: str, model: str, world: World) -> None:
    distill = f"--distill.teacher {model} --distill.divergence jensen_shannon"
    config = sft(model, f"{distill} {more}", 96)
    (phase,) = Planner(CPU).phases(config)
    counter = LiveBytes("cpu")
    with counter:
        student = build_engine(spec("student", model, config, config), world)
        teacher = build_engine(spec("teacher", model, config, None), world)
        counted(counter, student, teacher)
        counter.restart()
        ids = torch.randint(3, 4000, (4, 96))
        mask = torch.ones_like(ids, dtype=torch.bool)
        for _ in range(2):
            for _ in range(2):
                with torch.no_grad():
                    hidden = teacher(ids, mask, mask)
                lesson = TeacherTargets(hidden, teacher.module.head, DistillationRule("jensen_shannon"))  # type: ignore[arg-type]
                total, *_ = student(ids, mask, mask, targets=lesson)
                student.backward(total, count=100.0)
                del total, lesson, hidden
            student.step()
    assert 0.95 <= phase.total / counter.peak <= 1.6, f"{phase.total / counter.peak:.3f} of {counter.peak / 1e6:.1f} MB"


def test_answers_for_distillation_hold_what_was_planned(model: str, world: World) -> None:
    distill = f"--distill.teacher {model} --distill.on_policy_fraction 1 --distill.sampling.max_new_tokens 8"
    config = sft(model, f"{distill} --train.micro_batch_tokens 8192", 56)
    generation, training = Planner(CPU).phases(config)
    assert (generation.name, training.name) == ("generation", "SFT training")
    counter = LiveBytes("cpu")
    with counter:
        student = build_actor(spec("student", model, config, config), world)
        teacher = build_engine(spec("teacher", model, config, None), world)
        counted(counter, student, teacher)
        objective = DistillObjective(config.distill, teacher, tiny_tokenizer(), seed=config.seed, max_length=56)
        ids = torch.randint(3, 4000, (8, 50)).tolist()
        rows = [
            {"input_ids": row, "loss_mask": [False] * 48 + [True] * 2, "is_text": False, "place": n}
            for n, row in enumerate(ids)
        ]
        batch = objective.collate(rows)
        student.backward(objective.loss(student, batch).total, count=16.0)  # AdamW's moments are there from its first
        student.step()
        counter.restart()
        (answered,) = objective.resample(student, [batch], step=1)
    assert answered.on_policy
    near(generation, counter.peak)


def test_an_evaluation_by_generation_is_planned_as_sampling_of_its_prompts(model: str) -> None:
    """As that of on-policy distillation for as many rows of the same length, without the teacher."""
    sampling = SamplingParams(max_new_tokens=8)
    reward = [RewardComponentConfig(verifier="math")]
    asked = GeneratedEvaluationConfig(sources=["a"], components=reward, max_prompt_tokens=48, sampling=sampling)
    config = sft(model, "--data.max_eval_rows 8", 56)
    config = replace(config, train=replace(config.train, evaluate_by_generation=asked))
    evaluated, training = Planner(CPU).phases(config)
    assert (evaluated.name, training.name) == ("generation", "SFT training")
    distill = f"--distill.teacher {model} --distill.on_policy_fraction 1 --distill.sampling.max_new_tokens 8"
    answers, _ = Planner(CPU).phases(sft(model, distill, 56))
    assert evaluated.need.cache == answers.need.cache > 0 and evaluated.total < answers.total


@pytest.mark.parametrize("name", [*[*PPO_CASES][:1], slow([*PPO_CASES][1]), *map(faults, [*PPO_CASES][2:])])
def test_ppo_holds_what_was_planned(name: str, model: str, world: World) -> None:
    config = ppo(
        model,
        "--rollout.prompts_per_step 8 --rollout.max_prompt_tokens 48 --rollout.sampling.max_new_tokens 8 "
        f"--train.micro_batch_tokens 240 --algorithm.mini_batches 1 {PPO_CASES[name]}",
    )
    role, rollout, shared = config.actor, config.rollout, "share_base" in PPO_CASES[name]
    frozen = ZeroConfig(stage=3) if role.zero.stage == 3 else ZeroConfig()
    planned = {phase.name: phase for phase in Planner(CPU).phases(config)}
    counter = LiveBytes("cpu")
    measured: dict[str, float] = {}

    def told(phase: str) -> None:
        measured[phase] = max(measured.get(phase, 0.0), counter.peak)
        counter.restart()

    with counter:
        actor = build_actor(spec("actor", model, config, role), world, rollout=rollout)
        base = actor.lm if shared else None
        critic = build_engine(replace(spec("critic", model, config, role), base=base), world)
        reward = build_engine(replace(spec("reward", model, config, None), zero=frozen, offload_weights=shared), world)
        reference = None
        if role.lora is None:
            reference = build_engine(replace(spec("reference", model, config, None), zero=frozen), world)
        roles = Roles(
            world, actor, Reward([ModelReward(RewardComponentConfig(model=model), reward)], world), critic, reference
        )
        counted(counter, *(engine for engine in (actor, critic, reward, reference) if engine is not None))
        counter.restart()
        sampler = RolloutSampler(
            actor,
            rollout,
            world=world,
            stop_token_ids=(),
            seed=0,
            timers=Timers(world.device),
            tokenizer=tiny_tokenizer(),
        )
        parts = RLParts.of(roles, PPO(config.algorithm), sampler, micro_batches=MicroBatches(None, 240))
        updater, scorer = parts.updater, parts.scorer
        update_critic = updater._update_critic

        def watched(*arguments: Any) -> Any:
            told("actor training")
            return update_critic(*arguments)

        updater._update_critic = watched  # type: ignore[method-assign]
        prompts = [{"input_ids": torch.randint(3, 4000, (48,)).tolist()} for _ in range(8)]
        for step in range(2):
            completions = parts.sampler.sample(prompts, step=step)
            told("generation")
            plan = parts.plan(completions, step=step)
            batch = parts.estimate(scorer.compute_logprobs(scorer.score(prompts, completions), plan), kl_coef=0.1)
            told("scoring")
            updater.update(batch, [plan])
            told("critic training")
    for phase, most in measured.items():
        near(planned[phase], most)


@pytest.fixture
def one_layer(model: str, tmp_path: Path) -> str:
    """The config of the model with one layer, whose memory is measured six times as fast."""
    AutoConfig.from_pretrained(model, num_hidden_layers=1).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_step_is_planned_on_the_model_that_it_will_start_from(one_layer: str, tmp_path: Path) -> None:
    """What SFT starts from goes through all steps; without SFT they start from the base."""

    def planned(line: str) -> dict[str, list[tuple[str, float]]]:
        config = parse_config(PlanConfig, f"--output_dir {tmp_path}/out {line}".split())
        steps = {name: step_config(name, config) for name in config.step_names}
        planner = planner_of(config, steps, CPU)
        return {name: [(phase.title, phase.total) for phase in planner.phases(step)] for name, step in steps.items()}

    whole = planned(f"--base_model {one_layer}")
    assert {*whole} == {"sft", "reward", "rl"}
    assert planned(f"--base_model absent/x --sft.model.path {one_layer}") == whole
    assert planned(f"--sft.model.path {one_layer}") == whole
    without = planned(f"--base_model {one_layer} --steps reward,rl")
    assert without == {name: whole[name] for name in ("reward", "rl")}


@pytest.mark.parametrize("finished", ["alike", "other", None])
def test_only_a_model_that_train_keeps_is_planned_in_place_of_the_base(
    finished: str | None, model: str, tmp_path: Path
) -> None:
    """Another run's, which may be of another size, is no model of this one."""
    line = f"--base_model {model} --output_dir {tmp_path}/out --steps sft,reward"
    config = parse_config(PlanConfig, line.split())
    steps = {name: step_config(name, config) for name in ("sft", "reward")}
    step = steps["sft"]

    def planned() -> dict[str, float]:
        phases = planner_of(config, steps, Device(torch.device("cpu"), 1, 2.0**40)).phases(steps["reward"])
        return {phase.title: phase.need.weights for phase in phases}

    before = planned()
    folder = Path(step.output_dir)
    folder.mkdir(parents=True)
    small = json.loads((Path(model) / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(small))
    save_config(step if finished != "other" else replace(step, seed=step.seed + 1), folder / "config.yaml")
    if finished is not None:
        (folder / "finished.json").write_text("{}")
    assert (planned() == before) == (finished != "alike")
