"""Configs to running steps: which model, data, engine and loop make a step. The mains only parse and call.

Order matters: data is read before models are loaded, so that a mistake in a file costs seconds.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.out_of_memory import out_of_memory_named
from hybrid_rlhf.algorithms.ppo import PPOUpdater
from hybrid_rlhf.algorithms.ppo_trainer import PPOTrainer
from hybrid_rlhf.algorithms.ptx import PtxBatches
from hybrid_rlhf.algorithms.reward import RewardObjective
from hybrid_rlhf.algorithms.rewards import build_reward
from hybrid_rlhf.algorithms.rollout import Roles, Rollout
from hybrid_rlhf.algorithms.sft import SFTObjective
from hybrid_rlhf.algorithms.supervised import (
    Objective,
    SupervisedTrainer,
    finish,
    save_engine,
    total_steps,
    train_loader,
)
from hybrid_rlhf.configs.batch_plan import BatchPlan, MicroBatches, plan_batch, plan_rollout
from hybrid_rlhf.configs.cli import save_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.ppo import PPOConfig, TrainedRoleConfig, frozen_zero
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sections import StepConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.loaders import GlobalBatches
from hybrid_rlhf.data.tokenized import (
    TokenizedData,
    load_preference_data,
    load_prompt_data,
    load_ptx_data,
    load_sft_data,
)
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.models.folders import warn_of_remote_code
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer, stop_token_ids
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import CONFIG_FILE, Run, start_run

logger = logging.getLogger(LOGGER_NAME)


def run_sft(config: SFTConfig) -> None:
    """Step 1, from config to saved model."""
    with start_run(config) as run, _memory_named(config, run):
        path, tokenizer = _start(config, run, config.model.path)
        data = load_sft_data(config.data, tokenizer=tokenizer, seed=config.seed, world=run.world)
        objective = SFTObjective(pad_token_id=_pad(tokenizer), device=run.world.device)
        _supervise(config, run, "actor", path, tokenizer, data, objective)


def run_reward(config: RewardConfig) -> None:
    """Step 2, from config to saved model."""
    with start_run(config) as run, _memory_named(config, run):
        path, tokenizer = _start(config, run, config.model.path)
        data = load_preference_data(config.data, tokenizer=tokenizer, seed=config.seed, world=run.world)
        objective = RewardObjective(
            pad_token_id=_pad(tokenizer),
            device=run.world.device,
            centering_coef=config.preference.centering_coef,
        )
        _supervise(config, run, "reward", path, tokenizer, data, objective)


def _supervise(
    config: SFTConfig | RewardConfig,
    run: Run,
    role: Role,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    data: TokenizedData,
    objective: Objective[Any],
) -> None:
    plan = plan_batch(
        global_batch_size=config.train.global_batch_size,
        ranks=run.world.size,
        micro_batches=MicroBatches(config.train.micro_batch_size, config.train.micro_batch_tokens),
    )
    _tell_plan(plan, run)
    steps = total_steps(train_loader(data.train, plan, run), config.train)
    spec = EngineSpec(
        role, path, config.model, config.zero, config.seed, config.optimizer, config.lora, steps,
        read_overrides(config.deepspeed_config),
    )  # fmt: skip
    engine = build_engine(spec, run.world)
    SupervisedTrainer(
        objective, engine, train=data.train, held_out=data.held_out, plan=plan, config=config.train, run=run
    ).train()
    finish(run, {"": engine}, tokenizer)


def run_ppo(config: PPOConfig) -> None:
    """Step 3, from config to saved actor and critic."""
    with start_run(config) as run, _memory_named(config, run):
        actor_path, tokenizer = _start(config, run, config.actor.path or config.model.path, key="actor.path")
        plan = _plan_ppo(config, run)
        data = load_prompt_data(
            config.data, tokenizer=tokenizer, seed=config.seed, world=run.world,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )  # fmt: skip
        ptx = (
            load_ptx_data(config.data, tokenizer=tokenizer, seed=config.seed, world=run.world)
            if config.ppo.ptx_coef
            else None
        )
        batches = GlobalBatches(len(data.train), global_batch_size=config.rollout.prompts_per_step, seed=config.seed)
        steps = batches.steps_per_epoch * config.train.epochs
        steps = steps if config.train.max_steps is None else min(steps, config.train.max_steps)
        roles = _build_roles(
            config, run, actor_path, tokenizer, updates=steps * config.ppo.epochs * config.ppo.mini_batches
        )
        average = WeightAverage(roles.actor.module, decay=config.ppo.ema_decay) if config.ppo.ema_decay else None
        generation_config = roles.actor.lm.generation_config
        rollout = Rollout(
            roles, sampling=config.rollout, algorithm=config.ppo, tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(tokenizer, generation_config.eos_token_id if generation_config else None),
            micro_batches=plan.micro_batches, seed=config.seed, timers=run.timers,
        )  # fmt: skip
        mixed = ptx and PtxBatches(
            ptx, global_batch_size=plan.global_batch_size,
            micro_batches=replace(plan.micro_batches, padded=not roles.actor.packs), seed=config.seed,
            pad_token_id=_pad(tokenizer), world=run.world,
        )  # fmt: skip
        updater = PPOUpdater(roles, config.ppo, rollout=config.rollout, average=average, ptx_batches=mixed)
        PPOTrainer(
            roles, rollout, updater, prompts=data.train, held_out=data.held_out, batches=batches, total_steps=steps,
            config=config, run=run, tokenizer=tokenizer, average=average,
        ).train()  # fmt: skip
        if average is not None:
            with average.applied():
                save_engine(run, "actor_ema", roles.actor, tokenizer)
        finish(run, {"actor": roles.actor, "critic": roles.critic}, tokenizer)


def _plan_ppo(config: PPOConfig, run: Run) -> BatchPlan:
    ranks, together = run.world.size, config.rollout.tensor_parallel
    if ranks % together:
        sizes = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise UserError(f"rollout.tensor_parallel divides the ranks, {together} does not divide {ranks}: take {sizes}")
    plan = plan_rollout(
        prompts_per_step=config.rollout.prompts_per_step,
        samples_per_prompt=config.rollout.samples_per_prompt,
        mini_batches=config.ppo.mini_batches,
        ranks=run.world.size,
        micro_batches=MicroBatches(config.train.micro_batch_size, config.train.micro_batch_tokens),
    )
    _tell_plan(plan, run)
    return plan


def _build_roles(
    config: PPOConfig, run: Run, actor_path: str, tokenizer: PreTrainedTokenizerBase, *, updates: int
) -> Roles:
    if not config.reward.named_parts:
        raise UserError("reward.path must name a model, or reward.parts something else, got none: give --reward.path")
    critic = _warm(run, "critic") or config.critic_start
    critic_path = _resolve(config, run, critic, key="critic.path") if critic else actor_path
    # After a warm start the reference is still what the actor began as.
    reference = config.reference.path or (run.warm_start and (config.actor.path or config.model.path))
    reference_path = _resolve(config, run, str(reference), key="") if reference else actor_path
    for role, path in (("critic", critic_path), ("reference", reference_path)):
        _require_same_tokens(role, path, tokenizer, config)
    overrides = read_overrides(config.deepspeed_config)

    def trained(role: Role, path: str, section: TrainedRoleConfig) -> EngineSpec:
        return EngineSpec(
            role, path, config.model, section.zero, config.seed, section.optimizer, section.lora, updates, overrides
        )

    def frozen(role: Role, path: str, sibling: TrainedRoleConfig) -> ModelEngine:
        zero = frozen_zero(sibling.zero, offload=config.rollout.offload_frozen)
        spec = EngineSpec(role, path, config.model, zero, config.seed, deepspeed_overrides=overrides)
        return build_engine(replace(spec, offload_weights=config.rollout.offload_frozen and zero.stage < 3), run.world)

    own_reference = config.actor.lora.rank > 0 and reference_path == actor_path
    actor = build_actor(trained("actor", actor_path, config.actor), run.world, rollout=config.rollout)
    base = actor.lm if config.critic.share_base else None
    return Roles(
        actor=actor,
        critic=build_engine(replace(trained("critic", critic_path, config.critic), base=base), run.world),
        reward=build_reward(
            config.reward.named_parts, run.world, tokenizer=tokenizer,
            resolve=lambda path: _resolve(config, run, path, key="reward.path"),
            load_tokenizer=lambda path: load_tokenizer(path, trust_remote_code=config.model.trust_remote_code),
            build_engine=lambda path: frozen("reward", path, config.critic),
        ),
        reference=None if own_reference else frozen("reference", reference_path, config.actor),
    )  # fmt: skip


def _memory_named(config: SFTConfig | RewardConfig | PPOConfig, run: Run) -> contextlib.AbstractContextManager[None]:
    return out_of_memory_named(config, run.world, lambda: run.watchdog.phase)


def _start(
    config: StepConfig, run: Run, path: str | None, *, key: str = "model.path"
) -> tuple[str, PreTrainedTokenizerBase]:
    """Write the resolved config, and find the model, or what a warm start puts in its place, and its tokenizer."""
    warn_of_remote_code(config.model.trust_remote_code, run.world)
    resolved = _resolve(config, run, _warm(run, "actor") or path, key=key)
    if run.warm_start is not None and run.checkpoint is None and run.world.is_main:
        logger.info("warm start from the weights in %s; optimizer, schedule and data begin anew", run.warm_start)
    tokenizer = load_tokenizer(resolved, trust_remote_code=config.model.trust_remote_code)
    if run.world.is_main:
        save_config(run.resumable_config, run.folder / CONFIG_FILE)
    return resolved, tokenizer


def _warm(run: Run, role: str) -> str | None:
    """Where a warm start has a role's model; none: it has none, or this is no warm start."""
    if run.warm_start is None:
        return None
    folders = [run.warm_start / role] + [run.warm_start] * (role == "actor")
    return next((str(folder) for folder in folders if (folder / "config.json").is_file()), None)


def _resolve(config: StepConfig, run: Run, path: str | None, *, key: str) -> str:
    if path is None:
        raise UserError(f"{key} must name a model, got none: give --{key} FOLDER, a hub name or a .gguf file")
    return resolve_model(path, world=run.world, cache_dir=config.data.cache_dir)


def _require_same_tokens(role: str, path: str, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> None:
    """Scores and values are read off the actor's own token ids."""
    other = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    if other.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"the {role} must share the actor's tokens, {path} has a different vocabulary "
            f"({len(other)} against {len(tokenizer)} tokens): train it from the actor's family"
        )


def _tell_plan(plan: BatchPlan, run: Run) -> None:
    if run.world.is_main:
        logger.info(plan.describe())


def _pad(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.pad_token_id)  # type: ignore[arg-type]
