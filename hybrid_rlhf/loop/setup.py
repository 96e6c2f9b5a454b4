"""Set-up that all steps share: resolve the model, load its tokenizer, write the config, log the batch plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.run import StepConfig
from hybrid_rlhf.configs.sections.training import frozen_zero
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.chat.conversation import turn_end
from hybrid_rlhf.data.chat.template import WITHOUT_TEMPLATE, set_plain_template
from hybrid_rlhf.data.images.expansion import ImageRules
from hybrid_rlhf.data.rows.conditional import CONDITION_FILE, ScoreBuckets
from hybrid_rlhf.data.rows.counts import RowCounts
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.generation.image_loading import image_rules as rules_of_model
from hybrid_rlhf.loop.batch_plan import BatchPlan
from hybrid_rlhf.loop.report.writing import write_report
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.pretrained.folders import load_config, warn_of_remote_code
from hybrid_rlhf.models.pretrained.loading import position_limit
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.planning.out_of_memory import explain_out_of_memory
from hybrid_rlhf.planning.phase_memory import AnyStep
from hybrid_rlhf.runtime.command_line import save_config
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import CONFIG_FILE, DATA_FILE, Callback, Run, start_run


@contextlib.contextmanager
def open_step(config: AnyStep, callbacks: Sequence[Callback] = ()) -> Iterator[Run]:
    """Context of a run that explains out-of-memory errors and ends with a report; see start_run."""
    with start_run(config, callbacks) as run:
        run.at_end.append(write_report)
        with explain_out_of_memory(config, run):
            yield run


def start_step(config: StepConfig, run: Run, path: str | None) -> tuple[str, PreTrainedTokenizerBase]:
    """Write the resolved config, and return the path of the model to start from and its tokenizer.

    A warm start replaces the path by that of its actor.
    """
    warn_of_remote_code(config.model.trust_remote_code, run.world)
    resolved = resolve(config, run, warm_start_folder(run, "actor") or path, key="model.path")
    if run.warm_start is not None and run.checkpoint is None and run.world.is_main:
        logger.info(
            "warm start from the weights in %s; optimizer, schedule and data start from the beginning", run.warm_start
        )
    tokenizer = load_tokenizer(
        resolved,
        trust_remote_code=config.model.trust_remote_code,
        chat_template=config.data.chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    if tokenizer.chat_template is None:
        set_plain_template(tokenizer)
        if run.world.is_main:
            logger.warning(
                "%s %s, and the saved model has a template that writes these; set data.chat_template to a Jinja file "
                "for another format",
                config.model.path,
                WITHOUT_TEMPLATE,
            )
    if run.world.is_main:
        if turn_end(tokenizer) is None:
            logger.warning(
                "assistant turns of this chat template end without a special token, so a model does not learn to stop: "
                "set data.chat_template to a file whose assistant turns end with %s",
                tokenizer.eos_token,
            )
        save_config(run.folder_config, run.folder / CONFIG_FILE)
    return resolved, tokenizer


def image_rules(config: StepConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> ImageRules:
    """How the images of rows are encoded for the model at a path; rows without images need no processor."""
    trusted = config.model.trust_remote_code
    return rules_of_model(path, tokenizer, max_pixels=config.data.max_image_pixels, trust_remote_code=trusted)


def warm_start_folder(run: Run, role: str) -> str | None:
    """Folder of a role's model in the warm start of a run; None if it has none, or without a warm start."""
    if run.warm_start is None:
        return None
    folders = [run.warm_start / role] + [run.warm_start] * (role == "actor")
    return next((str(folder) for folder in folders if (folder / "config.json").is_file()), None)


def resolve(config: StepConfig, run: Run, path: str | None, *, key: str) -> str:
    """Resolve a model's name to a path that can be loaded; raise UserError if there is none."""
    if path is None:
        raise UserError(f"{key} must name a model, got none: set --{key} to a folder, a hub name or a .gguf file")
    return resolve_model(path, world=run.world, cache_dir=config.data.cache_dir)


def log_plan(plan: BatchPlan, run: Run) -> None:
    """Log a batch plan on the main rank."""
    if run.world.is_main:
        logger.info(plan.describe())


def record_data(counts: RowCounts, run: Run) -> None:
    """Write the counts of the sources' rows to the run's folder, for the report."""
    if run.world.is_main:
        write_whole(run.folder / DATA_FILE, json.dumps(asdict(counts), indent=2, ensure_ascii=False) + "\n")


def save_condition(condition: ScoreBuckets, run: Run) -> None:
    """Write the score buckets of conditional SFT to the run's folder, and log them."""
    if run.world.is_main:
        write_whole(run.folder / CONDITION_FILE, json.dumps(condition.to_json(), indent=2) + "\n")
        edges = ", ".join(f"{edge:g}" for edge in condition.edges)
        logger.info(
            "conditional SFT: score buckets end at %s; prompts of the best bucket begin with %r",
            edges,
            condition.text(condition.buckets),
        )


def build_frozen_engine(config: SFTConfig | PreferenceStepConfig, run: Run, role: Role, path: str) -> ModelEngine:
    """A frozen model besides the trained one, sharded like it under ZeRO-3.

    Raises:
        UserError: when it cannot be loaded.
    """
    zero = frozen_zero(config.zero)
    overrides = read_overrides(config.deepspeed_config)
    return build_engine(
        EngineSpec(role, path, config.model, zero, config.seed, deepspeed_overrides=overrides), run.world
    )


def require_positions(engine: ModelEngine, tokens: int, *, key: str) -> None:
    """Raise UserError unless a model has positions for rows of `tokens` tokens, the value of `key`."""
    limit = position_limit(engine.lm)
    if limit is not None and tokens > limit:
        raise UserError(f"{key} must be at most the {limit} positions of the model, got {tokens}: set it to {limit}")


def require_same_tokens(
    role: str, path: str, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, learner: str = "actor"
) -> None:
    """Raise UserError unless the model at a path has the vocabulary of the trained model."""
    their_tokenizer = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
    if their_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"the {role} must share the {learner}'s tokens, {path} has a different vocabulary "
            f"({len(their_tokenizer)} against {len(tokenizer)} tokens): use a model of the {learner}'s family"
        )


def require_vision(name: str, path: str, model: ModelConfig) -> None:
    """Raise UserError unless the model at a path, which errors call `name`, reads the images of the actor's rows."""
    refusal = images_refused(load_config(path, trust_remote_code=model.trust_remote_code))
    if refusal is not None:
        raise UserError(f"{name} must read the images of the rows, {path} does not: {refusal}")


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Token id of padding; masks distinguish it from real tokens."""
    return int(tokenizer.pad_token_id)  # type: ignore[arg-type]
