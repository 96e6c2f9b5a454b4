"""Environments in the format of the library verifiers from 0.4 (`verifiers.v1`), as its hub has them: tasksets.

    python -m hybrid_rlhf.rl.environments.verifiers_hub NAME rows.jsonl [COUNT] [SETTINGS]

writes the tasks of an installed taskset as rows for `data.sources`. `play` is the program of an episode
(`environment.program`): the environment's own rollout, by a harness of verifiers, asks the actor, and its rewards and
judges score it. A row names its taskset, so that a run may mix several.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.rl.environments.environment import new_rows_file, read_settings
from hybrid_rlhf.runtime.command_line import user_errors
from hybrid_rlhf.runtime.output import print_result

with user_errors() if __name__ == "__main__" else contextlib.nullcontext():
    try:
        from verifiers.v1 import SamplingConfig
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise UserError(
            "environments of verifiers need the library verifiers from 0.4, which cannot be imported "
            f"({error}): pip install 'hybrid_rlhf[verifiers]'"
        ) from error

COLUMN = "verifiers"
"""Column with the name and the settings of the environment, and the data of the task."""
_KEY_VARIABLE = "HYBRID_RLHF_ROLLOUT_KEY"
"""Environment variable from which verifiers reads the key of the actor's address."""


async def play(base_url: str, api_key: str, model: str, row: Mapping[str, Any]) -> float:
    """Play the rollout of a row, and return its reward."""
    source = row[COLUMN]
    # Loading may take seconds, in which the requests of other episodes are answered. An environment serves one episode.
    environment = await asyncio.to_thread(load, source["name"], source["settings"])
    kind = environment.taskset.task_type()
    task = kind(kind.data_type().model_validate(source["task"]), environment.taskset.config.task)
    os.environ[_KEY_VARIABLE] = api_key
    client = EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE)
    async with environment.serving():
        context = ModelContext(model=model, client=client, sampling=SamplingConfig())
        episode = await environment.run_episode(task, context)
    if not episode.ok:
        told = next(error for part in (episode, *episode.traces) for error in part.errors)
        raise RuntimeError(f"verifiers: {told.type}: {told.message}")
    if len(episode.traces) != 1:
        raise UserError(
            f"an environment of verifiers must have one agent that plays once, {source['name']} has "
            f"{len(episode.traces)} rollouts in an episode: choose another"
        )
    return float(episode.traces[0].reward)


def load(name: str, settings: Mapping[str, Any]) -> Any:
    """The environment of an installed taskset. Without others in the settings, its agent has the harness `null`, which
    runs no code of the actor, as a process of this machine.

    Raises:
        UserError: if it cannot be loaded.
    """
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **settings.get("agent", {})}
    taskset = {**settings.get("taskset", {}), "id": name}
    try:
        config = resolve_env_config({**settings, "agent": agent, "taskset": taskset})
        return load_environment(config)
    except Exception as error:  # noqa: BLE001 - the code of the environment
        raise UserError(
            f"an environment of verifiers must be installed and take its settings, {name} with {json.dumps(settings)} "
            f"fails ({describe_error(error.__cause__ or error)}): install its package, or fix the settings"
        ) from error


def write_rows(name: str, file: Path, *, count: int = -1, settings: Mapping[str, Any] | None = None) -> int:
    """Write the tasks of a taskset as JSONL, and return the number of rows.

    Args:
        name: name of the taskset.
        file: path of the file.
        count: most rows; -1: all.
        settings: the table `env` of its configuration.
    """
    tasks = load(name, settings or {}).taskset
    if count < 0 and not tasks.bounded:
        raise UserError(f"an endless taskset needs a COUNT, {name} has none: give the number of rows")
    rows = []
    for task in tasks if count < 0 else tasks.take(count):
        told = {"system": task.data.system_prompt, "user": task.data.prompt_text or "."}
        prompt = [{"role": role, "content": text} for role, text in told.items() if text]
        data = task.data.model_dump(mode="json", exclude_unset=True)
        source = {"name": name, "settings": dict(settings or {}), "task": data}
        rows.append(json.dumps({"prompt": prompt, COLUMN: source}) + "\n")
    file.write_text("".join(rows))
    return len(rows)


def main(words: list[str]) -> None:
    """Write the rows of an environment; the arguments are NAME FILE [COUNT] [SETTINGS as JSON]."""
    count = words[2] if len(words) > 2 else "-1"
    if not 2 <= len(words) <= 4 or not count.removeprefix("-").isdigit():
        raise UserError(
            f"the line must be NAME FILE.jsonl [COUNT] [SETTINGS as JSON], got {' '.join(words)!r}: write these words"
        )
    file = new_rows_file(words[1])
    settings = read_settings(words[3]) if len(words) > 3 else {}
    rows = write_rows(words[0], file, count=int(count), settings=settings)
    print_result({"rows": rows, "file": str(file)}, f"{rows} rows in {file}")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
