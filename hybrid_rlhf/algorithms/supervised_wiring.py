"""Steps of one engine from their configs: which model, data and objective make a run. The mains only parse and call.

Order matters: data is read before models are loaded, so that a mistake in a file costs seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.calibration import calibrate, read_judgements, require_held_out
from hybrid_rlhf.algorithms.distillation import DistillObjective, find_teacher, with_places
from hybrid_rlhf.algorithms.judged import JudgedObjective
from hybrid_rlhf.algorithms.preference import KTO, PAIR_LOSSES
from hybrid_rlhf.algorithms.preference.objectives import LabelledObjective, PairObjective
from hybrid_rlhf.algorithms.preference.reference import ReferenceReader
from hybrid_rlhf.algorithms.reward import RewardObjective
from hybrid_rlhf.algorithms.sft import SFTObjective
from hybrid_rlhf.algorithms.starting import (
    frozen_beside,
    memory_named,
    pad_token,
    require_positions,
    start_step,
    tell_condition,
    tell_plan,
)
from hybrid_rlhf.algorithms.supervised import Objective, SupervisedTrainer, finish, total_steps, train_loader
from hybrid_rlhf.configs.batch_plan import BatchPlan, plan_batch
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.augmented import Rows, with_mismatched_answers
from hybrid_rlhf.data.bins import packed
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.data.stepwise import SEPARATOR_KEY
from hybrid_rlhf.data.tokenized import (
    load_labelled_data,
    load_preference_data,
    load_reward_data,
    load_sft_data,
)
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.runtime.checkpoint_folder import read_manifest
from hybrid_rlhf.runtime.run import Run, start_run

OneEngineConfig = SFTConfig | RewardConfig | PreferenceStepConfig


def run_sft(config: SFTConfig) -> None:
    """Step 1, from config to saved model."""
    with start_run(config) as run, memory_named(config, run):
        path, tokenizer = start_step(config, run, config.model.path)
        teacher = None if config.distill.teacher is None else find_teacher(config, run, tokenizer)
        data = load_sft_data(config.data, tokenizer=tokenizer, seed=config.seed, world=run.world)
        if data.condition is not None:
            tell_condition(data.condition, run)
        train: Rows = data.train
        if config.data.packing == "best_fit":
            train = packed(train, capacity=config.data.max_length, seed=config.seed, tell=run.world.is_main)
        if teacher is None:
            objective = SFTObjective(pad_token_id=pad_token(tokenizer), device=run.world.device)
            _supervise(config, run, "actor", path, tokenizer, train, data.held_out, objective)
            return
        learned = DistillObjective(config, frozen_beside(config, run, "teacher", teacher), tokenizer)
        _supervise(config, run, "student", path, tokenizer, with_places(train, config), data.held_out, learned)


def run_reward(config: RewardConfig) -> None:
    """Step 2, from config to saved model, calibrated where the config says."""
    with start_run(config) as run, memory_named(config, run):
        path, tokenizer = start_step(config, run, config.model.path)
        said = config.preference
        data = load_reward_data(config.data, said, tokenizer=tokenizer, seed=config.seed, world=run.world)
        if said.calibrate:
            require_held_out(data.held_out, said.heads)
        kind = JudgedObjective if said.loss in ("binary", "steps") else RewardObjective
        objective = kind(said, pad_token_id=pad_token(tokenizer), device=run.world.device)

        def after(engine: ModelEngine, plan: BatchPlan, steps: int) -> None:
            if said.loss == "steps":
                setattr(engine.lm.config, SEPARATOR_KEY, said.step_separator)
            if not said.calibrate:
                return
            run.watchdog.enter("calibration")
            judgements = read_judgements(objective, engine, data.held_out, plan, run)
            engine.lm.config.calibration, metrics = calibrate(judgements, said.heads, is_main=run.world.is_main)
            run.log(steps, metrics)
            run.say("calibration", metrics)

        _supervise(config, run, "reward", path, tokenizer, data.train, data.held_out, objective, after)


def run_preference(config: PreferenceStepConfig) -> None:
    """Learning from preferences without a reward model, from config to saved model."""
    with start_run(config) as run, memory_named(config, run):
        path, tokenizer = start_step(config, run, config.model.path)
        load = load_labelled_data if config.traits.labels else load_preference_data
        data = load(config.data, tokenizer=tokenizer, seed=config.seed, world=run.world)
        train, held_out = (
            with_mismatched_answers(rows, max_length=config.data.max_length) if config.traits.labels else rows
            for rows in (data.train, data.held_out)
        )
        plan = _plan(config, run)
        loader = train_loader(train, plan, run)
        steps = total_steps(loader, config.train)
        engine = _learner(config, run, "actor", path, steps=steps)
        reading = ReferenceReader(config, run, engine, path, tokenizer) if config.traits.reference else None
        live = reading if config.reference.logprobs == "live" else None
        settings: Any = {"pad_token_id": pad_token(tokenizer), "device": run.world.device, "reading": live}
        objective: Objective[Any]
        if config.traits.labels:
            objective = LabelledObjective(KTO(config.loss), **settings)
        else:
            objective = PairObjective(PAIR_LOSSES[config.algorithm](config.loss), **settings)
        if reading is not None and live is None:
            used = _rows_ahead(loader, run, steps)
            train, held_out = reading.kept(train, held_out, used=used, collate=objective.collate, plan=plan)
        _train(config, run, engine, tokenizer, train, held_out, plan, objective)


def _rows_ahead(loader: BatchLoader, run: Run, steps: int) -> list[int]:
    """The places of the training rows that a run of so many steps will still use, in the order of their first use."""
    done = 0
    if run.checkpoint is not None:
        manifest = read_manifest(run.checkpoint)
        done = manifest["step"]
        loader.load_state_dict(manifest["loop"]["loader"])
    return loader.batches.upcoming(max(0, steps - done))


def _supervise(
    config: SFTConfig | RewardConfig,
    run: Run,
    role: Role,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    train: Rows,
    held_out: Rows,
    objective: Objective[Any],
    after: Callable[[ModelEngine, BatchPlan, int], None] | None = None,
) -> None:
    """Train, then what comes after the last of so many steps, then save."""
    plan = _plan(config, run)
    steps = total_steps(train_loader(train, plan, run), config.train)
    engine = _learner(config, run, role, path, steps=steps)
    _train(config, run, engine, tokenizer, train, held_out, plan, objective,
           after=None if after is None else partial(after, engine, plan, steps))  # fmt: skip


def _plan(config: OneEngineConfig, run: Run) -> BatchPlan:
    plan = plan_batch(
        global_batch_size=config.train.global_batch_size,
        ranks=run.world.size,
        micro_batches=config.train.micro_batches,
    )
    tell_plan(plan, run)
    return plan


def _learner(config: OneEngineConfig, run: Run, role: Role, path: str, *, steps: int) -> ModelEngine:
    samples = isinstance(config, SFTConfig) and config.distill.on_policy_fraction > 0
    engine = (build_actor if samples else build_engine)(
        EngineSpec(
            role, path, config.model, config.zero, config.seed, config.optimizer, config.lora, steps,
            read_overrides(config.deepspeed_config),
            heads=tuple(config.preference.heads) if isinstance(config, RewardConfig) else (),
        ), run.world,
    )  # fmt: skip
    require_positions(engine, config.data.max_length, key="data.max_length")
    return engine


def _train(
    config: OneEngineConfig, run: Run, engine: ModelEngine, tokenizer: PreTrainedTokenizerBase, train: Rows,
    held_out: Rows, plan: BatchPlan, objective: Objective[Any], after: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    SupervisedTrainer(
        objective, engine, train=train, held_out=held_out, plan=plan, config=config.train, run=run
    ).train()
    if after is not None:
        after()
    finish(run, {"": engine}, tokenizer)
