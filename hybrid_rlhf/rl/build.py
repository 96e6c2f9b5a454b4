"""An RL run from its config: prompts, roles, algorithm, session.

Data is read before models are loaded, so that an error in a file is reported within seconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import PolicyGradientConfig
from hybrid_rlhf.configs.sections.placement import is_automatic
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.images.expansion import ImageRules
from hybrid_rlhf.data.loaders import FEW_UPDATES, RowStream
from hybrid_rlhf.data.tokenized import TokenizedData, load_prompt_data, load_ptx_data
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.role_model import Actor
from hybrid_rlhf.loop.batch_plan import BatchPlan, plan_rollout
from hybrid_rlhf.loop.setup import (
    image_rules,
    log_plan,
    open_step,
    pad_token,
    record_data,
    start_step,
)
from hybrid_rlhf.planning.micro_batches import resolve_micro_batches
from hybrid_rlhf.planning.room import require_room, resolve_keep_weights, resolve_kv_cache
from hybrid_rlhf.rl.algorithms import ALGORITHMS, Algorithm
from hybrid_rlhf.rl.environments import build_runner
from hybrid_rlhf.rl.images import IMAGES, ImageCatalogue, require_images_read
from hybrid_rlhf.rl.parts import RLParts, RLSession
from hybrid_rlhf.rl.rewards.functions import load_function
from hybrid_rlhf.rl.rewards.judge import read_rubric
from hybrid_rlhf.rl.roles import build_roles, log_placement, place_roles
from hybrid_rlhf.rl.rollouts.collector import Collector
from hybrid_rlhf.rl.rollouts.curriculum import Curriculum
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.rl.rollouts.teaching import Teaching
from hybrid_rlhf.rl.updates.ptx import PtxBatches
from hybrid_rlhf.runtime.observability.logs import logger, note
from hybrid_rlhf.runtime.placement import Placement
from hybrid_rlhf.runtime.run import Callback, Run
from hybrid_rlhf.runtime.world import World, shared_user_errors

PlacementChoice = Callable[[RLConfig, World], RLConfig]
"""Replaces `placement: auto` by named ranks; every rank calls it."""


@contextlib.contextmanager
def rl_session(
    config: RLConfig,
    callbacks: Sequence[Callback] = (),
    algorithm_class: type[Algorithm] | None = None,
    choose_placement: PlacementChoice | None = None,
) -> Iterator[RLSession]:
    """Read the data, then load the models, and wire the parts.

    Args:
        config: the run.
        callbacks: called with each step and its metrics.
        algorithm_class: a custom algorithm; None: that of the config.
        choose_placement: the planner's choice, which `placement: auto` needs.

    Raises:
        UserError: for `placement: auto` without a choice.
    """
    with open_step(config, callbacks) as run, contextlib.ExitStack() as stack:
        config.require_reward()
        for component in config.reward.named:  # a mistake in a file ends the run before a model is loaded
            if component.function is not None:
                load_function(component.function)
            if component.judge is not None:
                read_rubric(component.judge)
        actor_path, tokenizer = start_step(config, run, config.model.path)
        if is_automatic(config.placement):
            if choose_placement is None:
                raise UserError("placement auto needs the planner, this call has none: give choose_placement")
            config = choose_placement(config, run.world)
        placement = place_roles(config, run, actor_path)
        config = resolve_micro_batches(config, run, placement)
        plan = plan_step(config, run, placement)
        config = resolve_kv_cache(resolve_keep_weights(config, run.world), placement, run.world)
        log_placement(config, placement, run.world)
        require_room(config, placement, run.world)
        run.placed = config, placement
        rules = image_rules(config, actor_path, tokenizer)
        prompts, ptx = _read_data(config, run, tokenizer, rules)
        runs = [run.folder, *([] if run.checkpoint is None else [run.checkpoint.parents[1]])]
        catalogue = ImageCatalogue(
            prompts.train, prompts.held_out, rules=rules, folders=[folder / IMAGES for folder in runs]
        )
        environments = build_runner(
            config.environment,
            rollout=config.rollout,
            tokenizer=tokenizer,
            world=run.world,
            samples=any(group[0] == run.world.rank for group in placement.sampling_groups),
            images=catalogue,
        )
        images = catalogue if prompts.has_images or (environments and environments.shows_images) else None
        if images is not None:
            require_images_read(config, placement)
        stream = _stream(config, len(prompts.train))
        steps = total_steps(config, len(prompts.train))
        length = config.train.length_text(_steps_of_epochs(config, len(prompts.train)))
        if length and run.world.is_main:
            note(length)
        few_updates = few_updates_text(config, len(prompts.train))
        if few_updates and run.world.is_main:
            note(few_updates)
        value_lam = 1.0 if config.critic is None else config.critic.gae_lambda
        algorithm = (algorithm_class or ALGORITHMS[config.algorithm.name])(config.algorithm, value_lam=value_lam)
        algorithm.component_weights = {part.label: part.weight for part in config.reward.named}
        updates = steps * config.algorithm.epochs * config.algorithm.mini_batches
        roles = build_roles(config, run, placement, actor_path, tokenizer, updates=updates, images=images)
        stack.callback(roles.close)
        if config.teacher is not None:
            require(
                images is None or config.teacher.prompt_template is config.teacher.url is None,
                "teacher.prompt_template and teacher.url are for prompts of text, got images: leave them out",
            )
            with shared_user_errors(run.world):
                Teaching(config.teacher, roles, tokenizer).require_usable(
                    prompts.train,
                    prompts.held_out,
                    longest=config.rollout.max_prompt_tokens + config.rollout.sampling.max_new_tokens,
                )
        roles.reward.require_columns(lambda: map(json.loads, prompts.train["columns"]), has_images=images is not None)
        actor = roles.actor
        require(
            not (config.algorithm.reads_sampler and actor.rounds_otherwise),
            f"algorithm.old_logprobs sampler needs the dtype of training, got rollout.dtype {config.rollout.dtype}: "
            "leave one out",
        )
        average, ptx_batches = _beside_training(config, actor, ptx, plan, tokenizer)
        sampler = RolloutSampler(
            roles.sampler,
            config.rollout,
            world=run.world,
            stop_token_ids=stop_token_ids(tokenizer, actor.facts.eos_token_ids),
            seed=config.seed,
            timers=run.timers,
            tokenizer=tokenizer,
            environments=environments,
            images=images,
        )
        parts = RLParts.of(
            roles,
            algorithm,
            sampler,
            micro_batches=config.train.micro_batches(run.world.device.type, config.model),
            average=average,
            ptx_batches=ptx_batches,
            ptx_coef=config.ptx.coef if config.ptx else 0.0,
            teacher=config.teacher,
        )
        collector = Collector(
            StepStream(
                sampler,
                prompts=prompts.train,
                stream=stream,
                per_step=config.rollout.prompts_per_step,
                total_steps=steps,
                max_lag=config.rollout.max_lag,
                greedy=algorithm.wants_greedy,
            ),
            parts.scorer,
            algorithm,
        )
        yield RLSession(config, run, tokenizer, parts, prompts.train, prompts.held_out, collector)


def _beside_training(
    config: RLConfig,
    actor: Actor,
    ptx: TokenizedData | None,
    plan: BatchPlan,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[WeightAverage | None, PtxBatches | None]:
    """The average of the actor's weights, and the batches of PTX, where they are configured."""
    if not actor.world.is_member:
        return None, None
    average = WeightAverage(actor.module, decay=config.actor.ema_decay) if config.actor.ema_decay else None
    ptx_batches = (
        None
        if ptx is None
        else PtxBatches(
            ptx.train,
            has_images=ptx.has_images,
            global_batch_size=plan.global_batch_size,
            micro_batches=replace(plan.micro_batches, padded=not actor.packs),
            seed=config.seed,
            pad_token_id=pad_token(tokenizer),
            world=actor.world,
        )
    )
    return average, ptx_batches


def _read_data(
    config: RLConfig, run: Run, tokenizer: PreTrainedTokenizerBase, images: ImageRules
) -> tuple[TokenizedData, TokenizedData | None]:
    """Tokenized prompts, and the texts of PTX if configured."""
    prompts = load_prompt_data(
        config.data,
        tokenizer=tokenizer,
        seed=config.seed,
        world=run.world,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        images=images,
    )
    record_data(prompts.counts, run)
    if config.ptx is None:
        return prompts, None
    settings = {"tokenizer": tokenizer, "seed": config.seed, "world": run.world, "images": images}
    return prompts, load_ptx_data(config.ptx, config.data, **settings)


def _stream(config: RLConfig, prompts: int) -> RowStream:
    """The order in which the steps take the prompts."""
    epochs = config.train.passes
    if config.rollout.curriculum is None:
        return RowStream(prompts, epochs=epochs, seed=config.seed)
    return Curriculum(prompts, epochs=epochs, seed=config.seed, config=config.rollout.curriculum)


def total_steps(config: RLConfig, prompts: int) -> int:
    """Upper bound on the steps of the run; dynamic sampling may need more prompts per step, and also uses a last part
    that is smaller than a step.

    Raises:
        UserError: when the data has too few prompts for one step.
    """
    config.rollout.require_prompts(int(prompts * (config.train.epochs or 1)))
    return config.train.total_steps(_steps_of_epochs(config, prompts))


def _steps_of_epochs(config: RLConfig, prompts: int) -> int:
    taken = int(prompts * (config.train.epochs or 1))
    size = config.rollout.prompts_per_step
    return -(-taken // size) if config.algorithm.dynamic_sampling is not None else taken // size


def few_updates_text(config: RLConfig, prompts: int) -> str:
    """A warning that an epoch has fewer updates than most data sets need, with the rollout size that gives more; empty
    if it has enough."""
    size = config.rollout.prompts_per_step
    per_rollout = config.algorithm.epochs * config.algorithm.mini_batches
    updates = prompts // size * per_rollout
    smaller = max(1, prompts // -(-FEW_UPDATES // per_rollout))
    if updates >= FEW_UPDATES or smaller >= size:
        return ""
    return (
        f"an epoch of {prompts:,} prompts has only {updates} update{'s' * (updates != 1)}, {per_rollout} in each "
        f"rollout of {size} prompts: rollout.prompts_per_step {smaller} gives {prompts // smaller * per_rollout}"
    )


def plan_step(config: RLConfig, run: Run, placement: Placement) -> BatchPlan:
    """The batch plan of a step, logged once.

    Raises:
        UserError: when the sizes do not divide.
    """
    plans = [
        plan_rollout(
            prompts_per_step=config.rollout.prompts_per_step,
            completions_per_prompt=config.learned_per_prompt,
            mini_batches=config.algorithm.mini_batches,
            ranks=len(placement[name].ranks),
            micro_batches=config.train.micro_batches(run.world.device.type, config.model),
        )
        for name in ("actor", "critic")
        if name in placement.roles
    ]
    plan = plans[0]
    log_plan(plan, run)
    if run.world.is_main:
        _log_updates(config, completions=config.rollout.prompts_per_step * config.learned_per_prompt)
        _log_correction(config)
        if (teacher := config.teacher) is not None:
            beside = "beside the reward" if config.has_reward else "which is 0 without a reward"
            added = f"%g x log(p_teacher / p_actor) of each token is added to its advantage, {beside}"
            if teacher.divergence is not None:
                of = f"the teacher's {teacher.top_k} most likely tokens" if teacher.top_k else "the whole vocabulary"
                added = f"%g x the {teacher.divergence} divergence over {of} is added to the loss"
            logger.info(f"teacher: {added}", teacher.coef)
    return plan


def _log_correction(config: RLConfig) -> None:
    """Log the correction for the sampler, and warn where weights per token are biased (docs/algorithms.md)."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig) or algorithm.correction is None:
        return
    correction = algorithm.correction
    if config.rollout.samples_otherwise:
        logger.info(
            "algorithm.correction.ratio %s, method %s, clip %g: another policy than the trained one samples",
            correction.ratio,
            correction.method,
            correction.clip,
        )
    cases = {
        f"the ratio of sequences (algorithm {algorithm.name})": algorithm.default_correction.get("ratio") == "sequence",
        "completions of several weight versions (rollout.max_lag)": config.rollout.max_lag > 0,
        "8-bit sampling of long completions (rollout.quantization)": config.rollout.quantization is not None,
        "a grammar (rollout.sampling.response_format)": config.rollout.sampling.response_format is not None,
    }
    for case in (case for case, is_on in cases.items() if is_on and correction.ratio == "token"):
        logger.warning(
            "algorithm.correction weighs each token by its ratio, without the ratios of the tokens before it, which is "
            "biased for %s: watch rollout/correction_mean and rollout/logprob_abs_diff_mean, or set ratio to sequence",
            case,
        )


def _log_updates(config: RLConfig, *, completions: int) -> None:
    """Log the number of updates per rollout, and warn if the clip of ratios can never act."""
    epochs = config.algorithm.epochs
    parts = config.algorithm.mini_batches
    usual = type(config.algorithm).mini_batches
    uneven = not config.algorithm.single_update and parts < usual and completions % usual > 0
    fewer = f"; {completions} do not divide into {usual}" if uneven else ""
    logger.info(
        "updates: %d from a rollout of %d completions, %d epoch%s x %d mini-batch%s%s",
        epochs * parts,
        completions,
        epochs,
        "s" * (epochs > 1),
        parts,
        "es" * (parts > 1),
        fewer,
    )
    if config.algorithm.clip_is_idle:
        note(
            "algorithm %s clips ratios, but one update per rollout leaves all ratios at 1, so its clip never acts: "
            "give algorithm.mini_batches or algorithm.epochs 2 or more%s",
            config.algorithm.name,
            f", and rollout.prompts_per_step a multiple of {usual}" * uneven,
        )
