"""What every step does before its loop: the model found, its tokenizer read, the config written, sizes told."""

from __future__ import annotations

import contextlib
import json
import logging

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.memory_plan import AnyStep
from hybrid_rlhf.algorithms.out_of_memory import out_of_memory_named
from hybrid_rlhf.configs.batch_plan import BatchPlan
from hybrid_rlhf.configs.cli import save_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.ppo import frozen_zero
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.presets import lora_rates
from hybrid_rlhf.configs.sections import ModelConfig, StepConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.configs.whole_files import write_whole
from hybrid_rlhf.data.chat import turn_end
from hybrid_rlhf.data.conditional import CONDITION_FILE, Condition
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.models.folders import warn_of_remote_code
from hybrid_rlhf.models.loading import position_limit
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import CONFIG_FILE, Run

logger = logging.getLogger(LOGGER_NAME)


def memory_named(config: AnyStep, run: Run) -> contextlib.AbstractContextManager[None]:
    """Around a step: memory that runs out is told with what would help."""
    return out_of_memory_named(config, run.world, lambda: run.watchdog.phase)


def start_step(
    config: StepConfig, run: Run, path: str | None, *, key: str = "model.path"
) -> tuple[str, PreTrainedTokenizerBase]:
    """Write the resolved config, and find the model, or what a warm start puts in its place, and its tokenizer."""
    warn_of_remote_code(config.model.trust_remote_code, run.world)
    resolved = resolve(config, run, warm_folder(run, "actor") or path, key=key)
    if run.warm_start is not None and run.checkpoint is None and run.world.is_main:
        logger.info("warm start from the weights in %s; optimizer, schedule and data begin anew", run.warm_start)
    tokenizer = load_tokenizer(
        resolved, trust_remote_code=config.model.trust_remote_code, chat_template=config.data.chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )  # fmt: skip
    if run.world.is_main:
        if turn_end(tokenizer) is None:
            logger.warning(
                "answers in this chat template end with no special token, so a model does not learn to stop: give "
                "data.chat_template a file whose assistant turns end with %s", tokenizer.eos_token,
            )  # fmt: skip
        save_config(run.kept_config, run.folder / CONFIG_FILE)
        for name, (rate, full) in lora_rates(config).items():
            logger.info("%s is %g, the default with adapters: ten times the %g of all weights", name, rate, full)
    return resolved, tokenizer


def warm_folder(run: Run, role: str) -> str | None:
    """Where a warm start has a role's model; none: it has none, or this is no warm start."""
    if run.warm_start is None:
        return None
    folders = [run.warm_start / role] + [run.warm_start] * (role == "actor")
    return next((str(folder) for folder in folders if (folder / "config.json").is_file()), None)


def resolve(config: StepConfig, run: Run, path: str | None, *, key: str) -> str:
    """A model's path as it can be loaded; UserError where there is none."""
    if path is None:
        raise UserError(f"{key} must name a model, got none: give --{key} FOLDER, a hub name or a .gguf file")
    return resolve_model(path, world=run.world, cache_dir=config.data.cache_dir)


def tell_plan(plan: BatchPlan, run: Run) -> None:
    """Log a plan, once."""
    if run.world.is_main:
        logger.info(plan.describe())


def tell_condition(condition: Condition, run: Run) -> None:
    """Write what rows are told of their score to the run's folder, and log it."""
    if run.world.is_main:
        write_whole(run.folder / CONDITION_FILE, json.dumps(condition.settings(), indent=2) + "\n")
        edges = ", ".join(f"{edge:g}" for edge in condition.edges)
        logger.info(
            "conditional SFT: scores are cut at %s; a prompt for the best begins with %r",
            edges, condition.text(condition.buckets),
        )  # fmt: skip


def frozen_beside(config: SFTConfig | PreferenceStepConfig, run: Run, role: Role, path: str) -> ModelEngine:
    """A model that reads while another learns, sharded with it under ZeRO-3.

    Raises:
        UserError: when it cannot be loaded.
    """
    zero = frozen_zero(config.zero, offload=False)
    overrides = read_overrides(config.deepspeed_config)
    return build_engine(
        EngineSpec(role, path, config.model, zero, config.seed, deepspeed_overrides=overrides), run.world
    )


def require_positions(engine: ModelEngine, tokens: int, *, key: str) -> None:
    """Raise UserError unless a model has a position for each token of a row, whose length a key sets."""
    limit = position_limit(engine.lm)
    if limit is not None and tokens > limit:
        raise UserError(f"{key} {tokens} goes beyond the {limit} positions that the model has: set it to {limit}")


def require_same_tokens(
    role: str, path: str, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, learner: str = "actor"
) -> None:
    """Raise UserError unless the model at a path has the tokens of the one that learns."""
    other = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
    if other.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"the {role} must share the {learner}'s tokens, {path} has a different vocabulary "
            f"({len(other)} against {len(tokenizer)} tokens): train it from the {learner}'s family"
        )


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows up; masks say where."""
    return int(tokenizer.pad_token_id)  # type: ignore[arg-type]
