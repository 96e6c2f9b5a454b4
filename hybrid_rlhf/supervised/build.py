"""SFT, reward modeling and preference learning, from config to saved model.

Data is read before models are loaded, so that an error in a file is reported within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.preference import KTOConfig, PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.data.mismatched import with_mismatched_completions
from hybrid_rlhf.data.packing import pack_rows
from hybrid_rlhf.data.row_views import RowSequence
from hybrid_rlhf.data.rows.stepwise import SEPARATOR_KEY
from hybrid_rlhf.data.tokenized import load_labelled_data, load_preference_data, load_reward_data, load_sft_data
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.learning_rates import Learning
from hybrid_rlhf.loop.batch_plan import BatchPlan, plan_batch
from hybrid_rlhf.loop.saving import finish
from hybrid_rlhf.loop.setup import (
    build_frozen_engine,
    image_rules,
    log_plan,
    open_step,
    pad_token,
    record_data,
    require_positions,
    require_same_tokens,
    resolve,
    save_condition,
    start_step,
)
from hybrid_rlhf.loop.step import Step
from hybrid_rlhf.planning.micro_batches import resolve_micro_batches
from hybrid_rlhf.runtime.files.checkpoint_folder import read_manifest
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import Callback, Run
from hybrid_rlhf.supervised.calibration import calibrate, collect_calibration_data, require_held_out
from hybrid_rlhf.supervised.objectives.distillation import DistillObjective, with_row_numbers
from hybrid_rlhf.supervised.objectives.reward_labels import RewardLabelObjective
from hybrid_rlhf.supervised.objectives.reward_pairs import RewardPairObjective
from hybrid_rlhf.supervised.objectives.sft import SFTObjective
from hybrid_rlhf.supervised.preference import KTO, PAIR_LOSSES
from hybrid_rlhf.supervised.preference.objectives import PreferenceLabelObjective, PreferencePairObjective
from hybrid_rlhf.supervised.preference.reference import ReferenceModel
from hybrid_rlhf.supervised.trainer import Objective, SupervisedTrainer, steps_of_epochs, train_loader

SupervisedConfig = SFTConfig | RewardConfig | PreferenceStepConfig
Evaluation = Callable[[], dict[str, float]]
"""An evaluation by generation, which every rank calls."""
Prepare = Callable[
    [SFTConfig | PreferenceStepConfig, Run, PreTrainedTokenizerBase], Callable[[HybridEngine], Evaluation]
]
"""Reads what train.evaluate_by_generation needs, and then takes the trained model."""


class RewardModel(Step[RewardConfig]):
    """Reward model from preferences, ranked lists or labels; see `Step` for the arguments."""

    config_type = RewardConfig

    def _run(self) -> None:
        run_reward(self.config, self.callbacks)


def run_sft(config: SFTConfig, callbacks: Sequence[Callback] = (), prepare: Prepare | None = None) -> None:
    """SFT, or distillation where the config names a teacher; `prepare` is for train.evaluate_by_generation."""
    with open_step(config, callbacks) as run:
        path, tokenizer = start_step(config, run, config.model.path)
        distill = config.distill
        teacher_path = None
        if distill is not None:
            teacher_path = resolve(config, run, distill.teacher, key="distill.teacher")
            require_same_tokens("teacher", teacher_path, tokenizer, config.model, learner="student")
        data = load_sft_data(
            config.data,
            tokenizer=tokenizer,
            seed=config.seed,
            world=run.world,
            conditional=config.condition,
            images=image_rules(config, path, tokenizer),
        )
        record_data(data.counts, run)
        evaluation = _prepared(config, run, tokenizer, prepare)
        if data.score_buckets is not None:
            save_condition(data.score_buckets, run)
        train: RowSequence = data.train
        if config.data.packing == "best_fit":
            train = pack_rows(train, capacity=config.data.max_length, seed=config.seed, log=run.world.is_main)
        plan, _, steps = _plan(config, run, train)
        role: Role = "actor"
        sft = SFTObjective(pad_token_id=pad_token(tokenizer), device=run.world.device, has_images=data.has_images)
        sft.by_probability = config.loss == "dft"
        objective: Objective[Any] = sft
        if distill is not None and teacher_path is not None:
            role = "student"
            train = with_row_numbers(train, distill, max_length=config.data.max_length)
            teacher = build_frozen_engine(config, run, "teacher", teacher_path)
            objective = DistillObjective(
                distill,
                teacher,
                tokenizer,
                seed=config.seed,
                max_length=config.data.max_length,
                has_images=data.has_images,
            )
        engine = _build_learner(config, run, role, path, "sft", steps=steps)
        SupervisedTrainer(
            objective,
            engine,
            train=train,
            held_out=data.held_out,
            plan=plan,
            config=config.train,
            run=run,
            by_generation=evaluation(engine),
        ).train()
        finish(run, {"": engine}, tokenizer)


def run_reward(config: RewardConfig, callbacks: Sequence[Callback] = ()) -> None:
    """A reward model, calibrated where the config requests it."""
    objective_config = config.objective
    with open_step(config, callbacks) as run:
        path, tokenizer = start_step(config, run, config.model.path)
        data = load_reward_data(
            config.data,
            objective_config,
            tokenizer=tokenizer,
            seed=config.seed,
            world=run.world,
            images=image_rules(config, path, tokenizer),
        )
        record_data(data.counts, run)
        if objective_config.calibrate:
            require_held_out(data.held_out, objective_config.heads)
        learns_labels = objective_config.loss in ("binary", "steps")
        if learns_labels:
            _warn_of_one_label(data.train, run)
        objective_class = RewardLabelObjective if learns_labels else RewardPairObjective
        objective = objective_class(
            objective_config,
            pad_token_id=pad_token(tokenizer),
            device=run.world.device,
            has_images=data.has_images,
        )
        plan, _, steps = _plan(config, run, data.train)
        engine = _build_learner(config, run, "reward", path, "reward", steps=steps)
        SupervisedTrainer[Any](
            objective, engine, train=data.train, held_out=data.held_out, plan=plan, config=config.train, run=run
        ).train()
        if objective_config.loss == "steps":
            setattr(engine.lm.config, SEPARATOR_KEY, objective_config.step_separator)
        if objective_config.calibrate:
            run.watchdog.enter_phase("calibration")
            scores = collect_calibration_data(objective, engine, data.held_out, plan, run)
            engine.lm.config.calibration, metrics = calibrate(scores, objective_config.heads, is_main=run.world.is_main)
            run.log(steps, metrics)
            run.report("calibration", metrics)
        finish(run, {"": engine}, tokenizer)


def run_preference(
    config: PreferenceStepConfig, callbacks: Sequence[Callback] = (), prepare: Prepare | None = None
) -> None:
    """Preference learning without a reward model: DPO and its relatives; `prepare` as in `run_sft`."""
    with open_step(config, callbacks) as run:
        path, tokenizer = start_step(config, run, config.model.path)
        load = load_labelled_data if config.algorithm.learns_labels else load_preference_data
        images = image_rules(config, path, tokenizer)
        data = load(config.data, tokenizer=tokenizer, seed=config.seed, world=run.world, images=images)
        record_data(data.counts, run)
        evaluation = _prepared(config, run, tokenizer, prepare)
        parts: list[RowSequence] = [data.train, data.held_out]
        if config.algorithm.learns_labels:
            _warn_of_one_label(data.train, run)
            parts = [with_mismatched_completions(rows, max_length=config.data.max_length) for rows in parts]
        train, held_out = parts
        plan, loader, steps = _plan(config, run, train)
        engine = _build_learner(config, run, "actor", path, "preference", steps=steps)
        section = config.reference
        reference = None if section is None else ReferenceModel(config, section, run, engine, path, tokenizer)
        live = reference if section is not None and section.logprobs == "live" else None
        settings: Any = {
            "pad_token_id": pad_token(tokenizer),
            "device": run.world.device,
            "has_images": data.has_images,
            "reference": live,
        }
        objective: Objective[Any]
        if isinstance(config.algorithm, KTOConfig):
            objective = PreferenceLabelObjective(KTO(config.algorithm), **settings)
        else:
            objective = PreferencePairObjective(PAIR_LOSSES[config.algorithm.name](config.algorithm), **settings)
        if reference is not None and live is None:
            used = _remaining_rows(loader, run, steps)
            train, held_out = reference.with_cached_logprobs(
                train, held_out, used=used, collate=objective.collate, plan=plan
            )
        SupervisedTrainer[Any](
            objective,
            engine,
            train=train,
            held_out=held_out,
            plan=plan,
            config=config.train,
            run=run,
            by_generation=evaluation(engine),
        ).train()
        finish(run, {"": engine}, tokenizer)


def _prepared(
    config: SFTConfig | PreferenceStepConfig, run: Run, tokenizer: PreTrainedTokenizerBase, prepare: Prepare | None
) -> Callable[[ModelEngine], Evaluation]:
    """The evaluation by generation of a trained model, which measures nothing if the config has none."""
    if config.train.evaluate_by_generation is None:
        return lambda engine: dict
    assert prepare is not None
    of_model = prepare(config, run, tokenizer)
    return lambda engine: of_model(cast(HybridEngine, engine))


def _warn_of_one_label(train: RowSequence, run: Run) -> None:
    labels = {label for of_row in train["labels"] for label in of_row} if run.world.is_main else set()
    if len(labels) == 1:
        logger.warning(
            "all labels of the training data are %s: nothing is learned from the other kind, whose metrics are 0",
            *labels,
        )


def _plan(config: SupervisedConfig, run: Run, train: RowSequence) -> tuple[BatchPlan, BatchLoader, int]:
    """The sizes of batches, the loader of the training rows, and the number of updates."""
    train_config = resolve_micro_batches(config, run).train
    plan = plan_batch(
        global_batch_size=config.train.global_batch_size,
        ranks=run.world.size,
        micro_batches=train_config.micro_batches(run.world.device.type, config.model),
    )
    log_plan(plan, run)
    loader = train_loader(train, plan, run)
    return plan, loader, config.train.total_steps(steps_of_epochs(loader, config.train))


def _build_learner(
    config: SupervisedConfig, run: Run, role: Role, path: str, learning: Learning, *, steps: int
) -> ModelEngine:
    """The trained model; a hybrid engine where on-policy distillation or an evaluation samples from it."""
    distill = config.distill if isinstance(config, SFTConfig) else None
    samples = distill is not None and distill.on_policy_fraction > 0
    samples |= not isinstance(config, RewardConfig) and config.train.evaluate_by_generation is not None
    engine = (build_actor if samples else build_engine)(
        EngineSpec(
            role,
            path,
            config.model,
            config.zero,
            config.seed,
            config.optimizer,
            config.lora,
            steps,
            read_overrides(config.deepspeed_config),
            heads=tuple(config.objective.heads) if isinstance(config, RewardConfig) else (),
            learning=learning,
        ),
        run.world,
    )
    require_positions(engine, config.data.max_length, key="data.max_length")
    return engine


def _remaining_rows(loader: BatchLoader, run: Run, steps: int) -> list[int]:
    """Training rows that the remaining steps of a run use, in the order of their first use."""
    done = 0
    if run.checkpoint is not None:
        manifest = read_manifest(run.checkpoint)
        done = manifest["step"]
        loader.load_state_dict(manifest["loop"]["loader"])
    return loader.upcoming(max(0, steps - done))
