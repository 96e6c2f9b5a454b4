"""Step 3 from its config: which prompts, roles and algorithm make a run.

Order matters: data is read before models are loaded, so that a mistake in a file costs seconds.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.environments import Player, load_environment
from hybrid_rlhf.algorithms.kept_layout import with_keep_weights
from hybrid_rlhf.algorithms.on_policy import ON_POLICY_ALGORITHMS, OnPolicyAlgorithm
from hybrid_rlhf.algorithms.on_policy_trainer import OnPolicyTrainer
from hybrid_rlhf.algorithms.ptx import PtxBatches
from hybrid_rlhf.algorithms.rewards import build_reward
from hybrid_rlhf.algorithms.roles import Roles
from hybrid_rlhf.algorithms.rollout import Rollout
from hybrid_rlhf.algorithms.starting import (
    memory_named,
    pad_token,
    require_positions,
    require_same_tokens,
    resolve,
    start_step,
    tell_plan,
    warm_folder,
)
from hybrid_rlhf.algorithms.supervised import finish, save_engine
from hybrid_rlhf.algorithms.updater import Updater
from hybrid_rlhf.configs.batch_plan import BatchPlan, plan_rollout
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.on_policy import AlgorithmConfig
from hybrid_rlhf.configs.ppo import PPOConfig, TrainedRoleConfig, frozen_zero
from hybrid_rlhf.data.chat import stop_token_ids
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.data.tokenized import load_prompt_data, load_ptx_data
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.engines.partition import base_parameters
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Run, start_run

logger = logging.getLogger(LOGGER_NAME)


def run_on_policy(config: PPOConfig) -> None:
    """Step 3, by any on-policy algorithm, from config to saved actor and critic."""
    with start_run(config) as run, memory_named(config, run):
        actor_path, tokenizer = start_step(config, run, config.actor.path or config.model.path, key="actor.path")
        plan = plan_step(config, run)
        config = with_keep_weights(config, run.world)
        data = load_prompt_data(
            config.data, tokenizer=tokenizer, seed=config.seed, world=run.world,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )  # fmt: skip
        ptx = (
            load_ptx_data(config.data, tokenizer=tokenizer, seed=config.seed, world=run.world)
            if config.ppo.ptx_coef
            else None
        )
        stream = RowStream(len(data.train), epochs=config.train.epochs, seed=config.seed)
        steps = total_steps(config, stream)
        player = _player(config, run, tokenizer)
        algorithm = ON_POLICY_ALGORITHMS[config.algorithm](config.ppo, value_lam=config.critic.lam)
        roles = build_roles(
            config, run, actor_path, tokenizer, updates=steps * config.ppo.epochs * config.ppo.mini_batches
        )
        average = WeightAverage(roles.actor.module, decay=config.ppo.ema_decay) if config.ppo.ema_decay else None
        rollout = build_rollout(config, run, roles, algorithm, tokenizer, player=player)
        mixed = ptx and PtxBatches(
            ptx, global_batch_size=plan.global_batch_size,
            micro_batches=replace(plan.micro_batches, padded=not roles.actor.packs), seed=config.seed,
            pad_token_id=pad_token(tokenizer), world=run.world,
        )  # fmt: skip
        updater = Updater(roles, algorithm, rollout=config.rollout, average=average, ptx_batches=mixed)
        OnPolicyTrainer(
            roles, rollout, updater, algorithm, prompts=data.train, held_out=data.held_out, stream=stream,
            total_steps=steps, config=config, run=run, tokenizer=tokenizer, average=average,
        ).train()  # fmt: skip
        if average is not None:
            with average.applied():
                save_engine(run, "actor_ema", roles.actor, tokenizer)
        finish(run, roles.learners, tokenizer)


def total_steps(config: PPOConfig, stream: RowStream) -> int:
    """Steps of the run, at most: dynamic sampling may need more prompts for one, and takes the last few too.

    Raises:
        UserError: when the data has too few prompts for one.
    """
    size = config.rollout.prompts_per_step
    if stream.left < size:
        raise UserError(
            f"a step takes {size} prompts, the training data has {stream.left}: add rows or set "
            f"rollout.prompts_per_step to {stream.left} or less"
        )
    steps = -(-stream.left // size) if config.ppo.dynamic_sampling else stream.left // size
    return steps if config.train.max_steps is None else min(steps, config.train.max_steps)


def _player(config: PPOConfig, run: Run, tokenizer: PreTrainedTokenizerBase) -> Player | None:
    make = load_environment(config.environment, run.world)
    if make is None:
        return None
    return Player(make, config.environment, rollout=config.rollout, tokenizer=tokenizer, device=run.world.device)


def plan_step(config: PPOConfig, run: Run) -> BatchPlan:
    """How a step's completions are shared out; told once.

    Raises:
        UserError: when the sizes do not divide.
    """
    ranks, together = run.world.size, config.rollout.tensor_parallel
    if ranks % together:
        sizes = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise UserError(f"rollout.tensor_parallel divides the ranks, {together} does not divide {ranks}: take {sizes}")
    plan = plan_rollout(
        prompts_per_step=config.rollout.prompts_per_step,
        samples_per_prompt=config.learned_per_prompt,
        mini_batches=config.ppo.mini_batches,
        ranks=run.world.size,
        micro_batches=config.train.micro_batches,
    )
    tell_plan(plan, run)
    if run.world.is_main:
        _tell_updates(config, completions=config.rollout.prompts_per_step * config.learned_per_prompt)
    return plan


def _tell_updates(config: PPOConfig, *, completions: int) -> None:
    """Log the updates from a rollout of so many completions, and warn of a clip that they leave idle."""
    epochs, parts, usual = config.ppo.epochs, config.ppo.mini_batches, AlgorithmConfig().mini_batches
    uneven = not config.traits.once and parts < usual and completions % usual > 0
    fewer = f"; {completions} do not divide into {usual}" if uneven else ""
    logger.info(
        "updates: %d from a rollout of %d completions, %d epoch%s x %d mini-batch%s%s",
        epochs * parts, completions, epochs, "s" * (epochs > 1), parts, "es" * (parts > 1), fewer,
    )  # fmt: skip
    if config.clip_is_idle:
        logger.warning(
            "algorithm %s clips ratios, which one update from a rollout leaves all at 1, so that its clip never acts: "
            "give ppo.mini_batches or ppo.epochs 2 or more%s", config.algorithm,
            f", and rollout.prompts_per_step a multiple of {usual}" * uneven,
        )  # fmt: skip


def build_roles(
    config: PPOConfig, run: Run, actor_path: str, tokenizer: PreTrainedTokenizerBase, *, updates: int
) -> Roles:
    """The roles that the algorithm needs, on the run's ranks.

    Args:
        config: of step 3.
        run: whose ranks they are on.
        actor_path: resolved, where the actor starts.
        tokenizer: the actor's.
        updates: of the actor over the whole run, for its schedule.

    Raises:
        UserError: when a model cannot be loaded, or does not share the actor's tokens where it must.
    """
    if not config.reward.named_parts and config.environment.path is None:
        raise UserError("reward.path must name a model, or reward.parts something else, got none: give --reward.path")
    critic_path, reference_path = _critic_path(config, run, actor_path), _reference_path(config, run, actor_path)
    for role, path in (("critic", critic_path), ("reference", reference_path)):
        if path is not None:
            require_same_tokens(role, path, tokenizer, config.model)
    overrides = read_overrides(config.deepspeed_config)

    def trained(role: Role, path: str, section: TrainedRoleConfig) -> EngineSpec:
        return EngineSpec(
            role, path, config.model, section.zero, config.seed, section.optimizer, section.lora, updates, overrides
        )

    actor = build_actor(trained("actor", actor_path, config.actor), run.world, rollout=config.rollout)
    if config.data.ptx_sources:
        require_positions(actor, config.data.max_length, key="data.max_length")
    critic, reference = None, None
    if critic_path is not None:
        base = actor.lm if config.critic.share_base else None
        # a reward model's head reads whole answers; before their end its scores explain less than a constant
        fresh_head = config.critic.path is None and warm_folder(run, "critic") is None
        spec = trained("critic", critic_path, config.critic)
        critic = build_engine(
            replace(spec, base=base, fresh_head=fresh_head, head_lr=config.critic.head_lr), run.world
        )  # fmt: skip
    reward = build_reward(
        config.reward.named_parts, run.world, tokenizer=tokenizer,
        resolve=lambda path: resolve(config, run, path, key="reward.path"),
        load_tokenizer=lambda path: load_tokenizer(
            path, trust_remote_code=config.model.trust_remote_code,
            chat_template_kwargs=config.data.chat_template_kwargs,
        ),
        build_engine=lambda path: frozen_engine(config, run, "reward", path),
    )  # fmt: skip
    if reference_path is not None and not config.reads_without_adapters(reference_path, actor_path):
        reference = frozen_engine(config, run, "reference", reference_path)
        if config.ppo.reference_refresh_every:
            _require_alike(actor, reference, reference_path)
    return Roles(actor, reward, critic, reference)


def _require_alike(actor: ModelEngine, reference: ModelEngine, path: str) -> None:
    """Raise UserError unless a reference can take the actor's weights."""
    mine, other = (
        {name: tuple(getattr(weight, "ds_shape", weight.shape)) for name, weight in base_parameters(engine.lm)}
        for engine in (actor, reference)
    )
    if mine != other:
        raise UserError(
            f"ppo.reference_refresh_every gives the reference the actor's weights, {path} is of another shape: leave "
            "reference.path out"
        )


def frozen_engine(config: PPOConfig, run: Run, role: Role, path: str) -> ModelEngine:
    """A model that reads and does not learn, on the run's ranks.

    Args:
        config: of step 3: how it shards and where its weights live.
        run: whose ranks it is on.
        role: reward or critic give a scorer, reference or actor a language model.
        path: resolved.

    Raises:
        UserError: when it cannot be loaded.
    """
    sibling = config.actor if role in ("actor", "reference") else config.reward_sibling
    zero = frozen_zero(sibling.zero, offload=config.rollout.offload_frozen)
    overrides = read_overrides(config.deepspeed_config)
    spec = EngineSpec(role, path, config.model, zero, config.seed, deepspeed_overrides=overrides, heads=None)
    return build_engine(replace(spec, offload_weights=config.rollout.offload_frozen and zero.stage < 3), run.world)


def build_rollout(
    config: PPOConfig, run: Run, roles: Roles, algorithm: OnPolicyAlgorithm, tokenizer: PreTrainedTokenizerBase, *,
    player: Player | None = None,
) -> Rollout:  # fmt: skip
    """The rollout of roles, as the config says; a player answers in episodes with environments."""
    generation_config = roles.actor.lm.generation_config
    return Rollout(
        roles, sampling=config.rollout, algorithm=algorithm, reads_reference=config.uses_reference,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(tokenizer, generation_config.eos_token_id if generation_config else None),
        micro_batches=config.train.micro_batches, seed=config.seed,
        timers=run.timers, player=player,
    )  # fmt: skip


def _critic_path(config: PPOConfig, run: Run, actor_path: str) -> str | None:
    if not config.traits.critic:
        return None
    start = warm_folder(run, "critic") or config.critic_start
    return resolve(config, run, start, key="critic.path") if start else actor_path


def _reference_path(config: PPOConfig, run: Run, actor_path: str) -> str | None:
    if not config.uses_reference:
        return None
    # After a warm start the reference is still what the actor began as.
    start = config.reference.path or (run.warm_start and (config.actor.path or config.model.path))
    return resolve(config, run, str(start), key="reference.path") if start else actor_path
