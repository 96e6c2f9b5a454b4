"""An RL run from its config: prompts, roles, algorithm, trainer.

Data is read before models are loaded, so that an error in a file is reported within seconds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.algorithms import GSPOConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.batch_plan import BatchPlan, plan_rollout
from hybrid_rlhf.configs.sections.placement import Placement, adapts
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.loaders import FEW_UPDATES, RowStream
from hybrid_rlhf.data.tokenized import TokenizedData, load_prompt_data, load_ptx_data
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.loop.saving import finish, save_engine
from hybrid_rlhf.loop.setup import (
    log_plan,
    open_step,
    pad_token,
    record_data,
    start_step,
)
from hybrid_rlhf.loop.step import ModelSource, Step
from hybrid_rlhf.loop.user_code import register
from hybrid_rlhf.planning.automatic import Move, PlacementWatch, choose_placement
from hybrid_rlhf.planning.kept_weights import resolve_keep_weights
from hybrid_rlhf.planning.kv_cache import resolve_kv_cache
from hybrid_rlhf.planning.room import require_room
from hybrid_rlhf.rl.algorithms import ALGORITHMS, Algorithm
from hybrid_rlhf.rl.environments import Environment, EpisodeRunner, build_runner
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.roles import Roles, build_roles, log_placement, place_roles
from hybrid_rlhf.rl.rollouts.samples import SampleTexts
from hybrid_rlhf.rl.trainer import RLTrainer
from hybrid_rlhf.rl.updates.ptx import PtxBatches
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Callback, Run

logger = logging.getLogger(LOGGER_NAME)


RewardSource = Callable[..., Any] | str | Mapping[str, Any]
"""A Python function, a reward model's path, or the settings of a reward component."""


@dataclass(frozen=True)
class RLSession:
    """Models, data and parts of an RL run, for RLTrainer or a custom training loop."""

    config: RLConfig
    run: Run
    tokenizer: PreTrainedTokenizerBase
    parts: RLParts
    prompts: Dataset
    held_out: Dataset
    stream: RowStream
    """The order of the prompts over all epochs."""
    total_steps: int
    average: WeightAverage | None
    """Also none on ranks without the actor."""
    placement_watch: PlacementWatch | None = None
    """Compares times with the planner's, on the first rank with `placement: auto`."""
    adapts: bool = False
    """Whether the run may move to another placement between two steps."""

    def take_prompts(self) -> list[dict[str, Any]]:
        """The prompts of the next step; empty at the end of the data."""
        return [self.prompts[row] for row in self.stream.take(self.config.rollout.prompts_per_step)]

    def trainer(self, *, moved: Move | None = None) -> RLTrainer:
        """The loop over all steps; `moved`: the placement move that led to this session."""
        return RLTrainer(
            self.parts,
            prompts=self.prompts,
            held_out=self.held_out,
            stream=self.stream,
            total_steps=self.total_steps,
            config=self.config,
            run=self.run,
            texts=SampleTexts(self.prompts, self.tokenizer),
            average=self.average,
            placement_watch=self.placement_watch,
            adapts=self.adapts,
            moved=moved,
        )

    def save(self) -> None:
        """Save the trained models and mark the run as finished; every rank calls."""
        if self.config.actor.ema_decay:
            with contextlib.nullcontext() if self.average is None else self.average.applied():
                save_engine(self.run, "actor_ema", self.parts.roles.actor, self.tokenizer)
        finish(self.run, self.parts.roles.learners, self.tokenizer)


class RL(Step[RLConfig]):
    """RL of an actor on its own completions: PPO, or `algorithm="grpo"` and others.

        RL(model="embedded", data=[{"prompt": "Hello"}], algorithm="grpo", reward=my_function).train()

    `session` returns the parts for a custom training loop, instead of `train`. See `Step` for the other arguments.
    """

    config_type = RLConfig

    def __init__(
        self,
        config: RLConfig | ModelSource | None = None,
        *,
        reward: RewardSource | Sequence[RewardSource] | None = None,
        environment: type[Environment] | Mapping[str, Any] | None = None,
        algorithm_class: type[Algorithm] | None = None,
        **settings: Any,
    ) -> None:
        """Take the settings.

        Args:
            config: settings that the keywords override, or the model; none: the defaults.
            reward: one or several components: functions `f(prompts, completions, **columns)` that return a score per
                completion, paths of reward models, or settings of a component.
            environment: a class with `reset` and `step`, or the section `environment`; none: a completion is one turn.
            algorithm_class: a custom algorithm; it reads the settings of the section `algorithm`.
            settings: model, data, callbacks, and the other keys and sections of the config.

        Raises:
            UserError: for an unknown key, a wrong value, or a rule of the config.
        """
        if reward is not None:
            rewards = [reward] if callable(reward) or isinstance(reward, (str, Mapping)) else list(reward)
            components = [{"function": register(each)} if callable(each) else each for each in rewards]
            settings["reward"] = {"components": components}
        if environment is not None:
            settings["environment"] = {"path": register(environment)} if isinstance(environment, type) else environment
        super().__init__(config, **settings)
        self._algorithm_class = algorithm_class

    def session(self) -> contextlib.AbstractContextManager[RLSession]:
        """The run's models, data and parts; the process group is closed at the end of the context."""
        return rl_session(self.config, self.callbacks, self._algorithm_class)

    def _run(self) -> None:
        run_rl(self.config, self.callbacks, self._algorithm_class)


def run_rl(
    config: RLConfig, callbacks: Sequence[Callback] = (), algorithm_class: type[Algorithm] | None = None
) -> None:
    """RL by any algorithm, from config to saved actor and critic."""
    with _opened_run(config, callbacks, algorithm_class) as builder:
        session = builder.first()
        trainer = session.trainer()
        trainer.train()
        while (move := trainer.move) is not None:
            session.parts.roles.close()
            del session, trainer  # before the next ones take memory
            session = builder.after(move)
            trainer = session.trainer(moved=move)
            trainer.train()
        session.save()


@contextlib.contextmanager
def rl_session(
    config: RLConfig, callbacks: Sequence[Callback] = (), algorithm_class: type[Algorithm] | None = None
) -> Iterator[RLSession]:
    """Read the data, then load the models, and wire the parts."""
    with _opened_run(config, callbacks, algorithm_class) as builder:
        yield builder.first()


@contextlib.contextmanager
def _opened_run(
    config: RLConfig, callbacks: Sequence[Callback], algorithm_class: type[Algorithm] | None
) -> Iterator[_SessionBuilder]:
    with open_step(config, callbacks) as run:
        yield _SessionBuilder(config, run, algorithm_class)


class _SessionBuilder:
    """Builds the session of a run, and those after each move to another placement."""

    def __init__(self, config: RLConfig, run: Run, algorithm_class: type[Algorithm] | None) -> None:
        self._config, self._run, self._algorithm_class = config, run, algorithm_class
        self._actor_path, self._tokenizer = start_step(config, run, config.model.path, key="model.path")

    def first(self) -> RLSession:
        """The session of the run's start."""
        config, self._watch = choose_placement(self._config, self._run.world)
        return self._session(config)

    def after(self, move: Move) -> RLSession:
        """The session after a move, which resumes from the checkpoint of its step."""
        gc.collect()  # engines are in reference cycles
        self._run.watchdog.beat("move to another placement")
        self._run.continue_from(move.step)
        self._run.timers.forget_peaks()
        if self._watch is not None:
            self._watch.moved()
        return self._session(move.settings.applied(self._config))

    @cached_property
    def _data(self) -> tuple[TokenizedData, Dataset | None]:
        """Prompts and texts of PTX, which a run reads once."""
        config, tokenizer, world = self._config, self._tokenizer, self._run.world
        prompts = load_prompt_data(
            config.data,
            tokenizer=tokenizer,
            seed=config.seed,
            world=world,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )
        record_data(prompts.counts, self._run)
        if config.ptx is None:
            return prompts, None
        return prompts, load_ptx_data(config.ptx, config.data, tokenizer=tokenizer, seed=config.seed, world=world)

    def _session(self, config: RLConfig) -> RLSession:
        run, tokenizer = self._run, self._tokenizer
        placement = place_roles(config, run, self._actor_path)
        plan = plan_step(config, run, placement)
        config = resolve_kv_cache(resolve_keep_weights(config, run.world), placement, run.world)
        log_placement(config, placement, run.world)
        require_room(config, placement, run.world)
        run.placed = config, placement
        prompts, ptx = self._data
        stream = RowStream(len(prompts.train), epochs=config.train.epochs, seed=config.seed)
        steps = total_steps(config, stream)
        few_updates = few_updates_text(config, len(prompts.train))
        if few_updates and run.world.is_main:
            logger.warning(few_updates)
        environments = build_runner(
            config.environment,
            rollout=config.rollout,
            tokenizer=tokenizer,
            world=run.world,
            samples=any(group[0] == run.world.rank for group in placement.sampling_groups),
        )
        value_lam = 1.0 if config.critic is None else config.critic.gae_lambda
        algorithm_class = self._algorithm_class or ALGORITHMS[config.algorithm.name]
        algorithm = algorithm_class(config.algorithm, value_lam=value_lam)
        require(
            config.rollout.partial is None or not algorithm.wants_greedy,
            "rollout.partial carries sampled completions, got the greedy baseline of algorithm "
            f"{config.algorithm.name}: leave it out",
        )
        updates = steps * config.algorithm.epochs * config.algorithm.mini_batches
        start = time.perf_counter()
        roles = build_roles(config, run, placement, self._actor_path, tokenizer, updates=updates)
        roles.reward.require_columns(lambda: map(json.loads, prompts.train["columns"]))
        if self._watch is not None:
            self._watch.build_seconds = time.perf_counter() - start
        actor, average, ptx_batches = roles.actor, None, None
        if isinstance(actor, ModelEngine):
            average = WeightAverage(actor.module, decay=config.actor.ema_decay) if config.actor.ema_decay else None
            ptx_batches = ptx and PtxBatches(
                ptx,
                global_batch_size=plan.global_batch_size,
                micro_batches=replace(plan.micro_batches, padded=not actor.packs),
                seed=config.seed,
                pad_token_id=pad_token(tokenizer),
                world=actor.world,
            )
        parts = build_parts(
            config,
            run,
            roles,
            algorithm,
            tokenizer,
            environments=environments,
            average=average,
            ptx_batches=ptx_batches,
        )
        return RLSession(
            config,
            run,
            tokenizer,
            parts,
            prompts.train,
            prompts.held_out,
            stream,
            steps,
            average,
            self._watch,
            adapts(self._config.placement),
        )


def total_steps(config: RLConfig, stream: RowStream) -> int:
    """Upper bound on the steps of the run; dynamic sampling may need more prompts per step, and uses the last few too.

    Raises:
        UserError: when the data has too few prompts for one step.
    """
    config.rollout.require_prompts(stream.left)
    size = config.rollout.prompts_per_step
    steps = -(-stream.left // size) if config.algorithm.dynamic_sampling is not None else stream.left // size
    return steps if config.train.max_steps is None else min(steps, config.train.max_steps)


def few_updates_text(config: RLConfig, prompts: int) -> str:
    """That an epoch has fewer updates than most data sets need, and the rollout size that gives more; empty: it has
    enough."""
    size, per_rollout = config.rollout.prompts_per_step, config.algorithm.epochs * config.algorithm.mini_batches
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
            micro_batches=config.train.micro_batches,
        )
        for name in ("actor", "critic")
        if name in placement.roles
    ]
    plan = plans[0]
    log_plan(plan, run)
    if run.world.is_main:
        _log_updates(config, completions=config.rollout.prompts_per_step * config.learned_per_prompt)
        _log_correction(config)
    return plan


def _log_correction(config: RLConfig) -> None:
    """Log the correction for the sampler, and warn where weights per token are biased (docs/async.md)."""
    correction = config.algorithm.correction
    if correction is None:
        return
    if config.rollout.samples_otherwise:
        logger.info(
            "algorithm.correction.method %s, clip %g: other weights than those that train sample",
            correction.method,
            correction.clip,
        )
    cases = {
        "the ratio of sequences (algorithm gspo)": isinstance(config.algorithm, GSPOConfig),
        "completions of several weight versions (rollout.partial)": config.rollout.partial is not None,
        "8-bit sampling of long completions (rollout.quantization)": config.rollout.quantization is not None,
    }
    for case in (case for case, is_on in cases.items() if is_on):
        logger.warning(
            "algorithm.correction weighs each token by its ratio, without the ratios of the tokens before it, which is "
            "biased for %s: watch rollout/correction_mean and rollout/logprob_abs_diff_mean, or leave this out",
            case,
        )


def _log_updates(config: RLConfig, *, completions: int) -> None:
    """Log the number of updates per rollout, and warn if the clip of ratios can never act."""
    epochs, parts, usual = config.algorithm.epochs, config.algorithm.mini_batches, type(config.algorithm).mini_batches
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
        logger.warning(
            "algorithm %s clips ratios, but one update per rollout leaves all ratios at 1, so its clip never acts: "
            "give algorithm.mini_batches or algorithm.epochs 2 or more%s",
            config.algorithm.name,
            f", and rollout.prompts_per_step a multiple of {usual}" * uneven,
        )


def build_parts(
    config: RLConfig,
    run: Run,
    roles: Roles,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerBase,
    *,
    environments: EpisodeRunner | None = None,
    average: WeightAverage | None = None,
    ptx_batches: PtxBatches | None = None,
) -> RLParts:
    """The parts of a step, wired by the config."""
    return RLParts.of(
        roles,
        algorithm,
        sampling=config.rollout,
        micro_batches=config.train.micro_batches,
        seed=config.seed,
        timers=run.timers,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(tokenizer, roles.actor.facts.eos_token_ids),
        environments=environments,
        average=average,
        ptx_batches=ptx_batches,
        ptx_coef=config.ptx.coef if config.ptx else 0.0,
    )
