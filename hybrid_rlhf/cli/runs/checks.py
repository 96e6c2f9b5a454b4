"""Checks the user's inputs of all steps of `hybrid-rlhf train` before the first step starts.

Each step makes the same checks when it starts, but a later step starts after the earlier ones have trained. Only the
first row of a local source and the names of models are read here, and the hub is not contacted. Reward functions and
environments are loaded in a separate process, started like a step: they find the same modules, and their memory is
freed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hybrid_rlhf.cli.runs.processes import tee
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import config_tree
from hybrid_rlhf.configs.parsing.schema import with_prefix
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.runtime.command_line import parse_config, save_config, user_errors
from hybrid_rlhf.runtime.files.reading import user_path

_MODULE = "hybrid_rlhf.cli.runs.checks"


def check_steps(steps: Mapping[str, Any], log: Path) -> None:
    """Check the data of the steps, their models, and the code that RL calls.

    Args:
        steps: the steps that will start.
        log: file for the output of the user's code.

    Raises:
        UserError: the error that the step would end with; for too few rows, the errors of all steps.
    """
    from hybrid_rlhf.data.rows.problems import RowProblems

    for name, step in steps.items():
        with _named(name):
            step.data.require_sources()
    check_sources(steps)
    _require_models(steps)
    shortages = RowProblems()
    for name, step in steps.items():
        with shortages.collected(), _named(name):
            _check_rows(name, step)
    if shortages.count:
        raise UserError("; ".join(shortages.texts))
    if "rl" in steps:
        with _named("rl"):
            _check_user_code(steps["rl"], log)


def check_sources(steps: Mapping[str, Any]) -> None:
    """Check that the first row of each local source can be read, and has the columns of its step.

    Raises:
        UserError: if a source does not exist, is not of its type, or its first row is one of another step.
    """
    from hybrid_rlhf.data.rows.formats import FORMS, form_of, unreadable_row_error
    from hybrid_rlhf.data.rows.sources import open_source, peek

    for name, step in steps.items():
        ptx = getattr(step, "ptx", None)
        with _named(name):
            for source in [*step.data.sources, *step.data.eval_sources]:
                if peek(source) is not None:
                    location, row = next(iter(open_source(source)))
                    if form_of(name, row) is None:
                        raise unreadable_row_error(location, row, [" + ".join(form) for form in FORMS[name]])
            for source in ptx.sources if ptx else ():
                peek(source)


def _require_models(steps: Mapping[str, Any]) -> None:
    """Require the models that steps load, but for those below a step's folder, which it writes, and those of a step
    that starts from another run's."""
    from hybrid_rlhf.models.pretrained.names import named_models, require_model

    written = [Path(os.path.realpath(step.output_dir)) for step in steps.values()]
    for name, step in steps.items():
        if step.resume not in ("never", "auto"):
            continue
        with _named(name):
            for _, path in named_models(step):
                place = Path(os.path.realpath(user_path(path)))
                if not any(place.is_relative_to(folder) for folder in written):
                    require_model(path)


def load_user_code(config: RLConfig) -> None:
    """Load the reward functions, the verifiers and the environment.

    Raises:
        UserError: if one cannot be loaded or has a wrong signature, or if it or a judge needs a column that local data
            lacks.
    """
    environment = config.environment
    if environment is not None and environment.path is not None:
        from hybrid_rlhf.rl.environments.environment import read_environment

        read_environment(environment)
    elif environment is not None and environment.program is not None:
        from hybrid_rlhf.rl.environments.programs import read_program

        read_program(environment)
    if checked := _checked_components(config):
        import torch

        from hybrid_rlhf.data.rows.sources import peek
        from hybrid_rlhf.rl.rewards.components import require_columns
        from hybrid_rlhf.rl.rewards.functions import FunctionReward
        from hybrid_rlhf.rl.rewards.verifiers.component import VerifierReward

        is_local = all(peek(source) is not None for source in config.data.sources)
        for component in checked:
            kind = FunctionReward if component.function else VerifierReward
            # a judge would ask its server
            reads = component.judge or kind(component, device=torch.device("cpu"))
            if is_local:
                require_columns(component.label, reads.columns, _prompt_columns(config.data.sources))


def _checked_components(config: RLConfig) -> list[RewardComponentConfig]:
    """The components with code or columns."""
    named = config.reward.named
    return [part for part in named if part.function or part.verifier or (part.judge and part.judge.columns)]


def _prompt_columns(sources: Sequence[str | DataSource]) -> Iterator[dict[str, Any]]:
    """The columns of each row except the prompt, as reward functions take them."""
    from hybrid_rlhf.data.rows.formats import read_prompt_row
    from hybrid_rlhf.data.rows.sources import open_source

    for source in sources:
        for location, row in open_source(source):
            yield read_prompt_row(location, row).columns


def _check_rows(name: str, step: Any) -> None:
    """Check that there are rows for an update, if none is dropped; sources on the hub are not counted and may be
    enough."""
    from hybrid_rlhf.data.loaders import require_batch
    from hybrid_rlhf.data.rows.sources import peek
    from hybrid_rlhf.data.tokenized import most_rows

    counts = [peek(source) for source in step.data.sources]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return
    rows = most_rows(name, step.data, known, step.seed)
    if name == "rl":
        step.rollout.require_prompts(int(rows * (step.train.epochs or 1)))
    elif rows >= step.train.global_batch_size:
        return
    elif name == "sft":  # a chat template may turn each assistant turn into a row
        require_batch(rows * _most_turns(step.data.sources), step.train.global_batch_size)
    else:
        require_batch(rows, step.train.global_batch_size)


def _most_turns(sources: Sequence[str | DataSource]) -> int:
    """The largest number of learned turns in a conversation; 1 for text."""
    from hybrid_rlhf.data.chat.messages import is_learned
    from hybrid_rlhf.data.rows.formats import read_sft_row
    from hybrid_rlhf.data.rows.sources import open_source

    records = (read_sft_row(location, row) for source in sources for location, row in open_source(source))
    return max(max(1, sum(map(is_learned, record.messages))) for record in records)


def _check_user_code(config: RLConfig, log: Path) -> None:
    environment = config.environment
    played = environment is not None and (environment.path or environment.program)
    if not played and not _checked_components(config):
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="hybrid_rlhf_") as folder:
        settings = Path(folder) / "rl.yaml"
        save_config(config, settings)
        end = tee([sys.executable, "-m", _MODULE, "--config", str(settings)], log, os.environ)
    if end.user_error is not None:
        raise UserError(end.user_error)
    if end.code:
        raise UserError(f"the user's code must load, it ended Python with exit code {end.code}: see {log}")


@contextmanager
def _named(step: str) -> Iterator[None]:
    """Context that prefixes an error with the name of the step, like the error of a step that has started."""
    try:
        yield
    except UserError as error:
        raise UserError(f"step {step}: {step_keys(str(error), step)}") from error


def step_keys(text: str, step: str) -> str:
    """A step's message with its keys as `train` has them."""
    tree = config_tree(PipelineConfig)
    return with_prefix(text, tree.sections[step], tree)


if __name__ == "__main__":
    with user_errors():
        load_user_code(parse_config(RLConfig))
