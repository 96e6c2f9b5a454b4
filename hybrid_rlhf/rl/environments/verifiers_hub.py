"""Environments in the format of the library verifiers, as its hub has them: packages with `load_environment`.

    python -m hybrid_rlhf.rl.environments.verifiers_hub NAME rows.jsonl [COUNT] [SETTINGS]

writes the data set of an installed environment as rows for `data.sources`. `play` is the program of an episode
(`environment.program`): the environment's own rollout, of one turn or several and with its tools, asks the actor by
verifiers' client, and its rubric gives the reward. A row names its environment, so that a run may mix several.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.loop.user_code import describe_error
from hybrid_rlhf.rl.environments.environment import new_rows_file, read_settings
from hybrid_rlhf.runtime.output import print_result

try:
    import verifiers
    from openai import AsyncOpenAI
    from verifiers.envs import environment as environment_module

    load_environment = verifiers.load_environment
except (ImportError, AttributeError) as error:
    raise UserError(
        "environments of verifiers need the library verifiers from 0.3.1, below 0.4, which cannot be imported "
        f"({error}): pip install 'hybrid_rlhf[verifiers]'"
    ) from error

COLUMN = "verifiers"
"""Column with the name and the settings of the environment."""
# Its environments set handlers of SIGTERM and SIGINT, with which a run saves a checkpoint before it ends.
environment_module.signal = SimpleNamespace(signal=lambda *_: None, SIGINT=None, SIGTERM=None)


async def play(base_url: str, api_key: str, model: str, row: Mapping[str, Any]) -> float:
    """Play the rollout of a row, and return its reward."""
    source = row[COLUMN]
    # Loading may take seconds, in which the requests of other episodes are answered.
    environment = await asyncio.to_thread(load, source["name"], json.dumps(source["settings"], sort_keys=True))
    task = {"answer": "", "info": {}, "example_id": 0} | {name: value for name, value in row.items() if name != COLUMN}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        outputs = await environment.generate(
            [{name: value for name, value in task.items() if value is not None}],
            verifiers.OpenAIChatCompletionsClient(client),
            model,
            on_start=_quiet,
            on_progress=_quiet,
            on_log=_quiet,
        )
    (output,) = outputs["outputs"]
    if output["error"] is not None:
        raise RuntimeError(f"verifiers: {output['error']}")
    return float(output["reward"])


@functools.cache
def load(name: str, settings: str) -> Any:
    """An installed environment, by its name and settings as JSON.

    Raises:
        UserError: if it cannot be loaded, or scores several rollouts together.
    """
    try:
        environment = load_environment(name, **json.loads(settings))
    except Exception as error:  # noqa: BLE001 - the code of the environment
        raise UserError(
            f"an environment of verifiers must be installed and take its settings, {name} with {settings} fails "
            f"({describe_error(error.__cause__ or error)}): install its package, or fix the settings"
        ) from error
    if environment.requires_group_rollouts:
        raise UserError(
            f"an environment of verifiers must score each rollout alone, {name} has rewards of groups: choose another"
        )
    return environment


def write_rows(name: str, file: Path, *, count: int = -1, settings: Mapping[str, Any] | None = None) -> int:
    """Write the training data of an environment as JSONL, and return the number of rows.

    Args:
        name: name of the environment.
        file: path of the file.
        count: most rows; -1: all.
        settings: keyword arguments of its `load_environment`.
    """
    source = {"name": name, "settings": dict(settings or {})}
    rows = load(name, json.dumps(source["settings"], sort_keys=True)).get_dataset(count)
    try:
        lines = [json.dumps({**_row(dict(row)), COLUMN: source}, allow_nan=False) + "\n" for row in rows]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"rows of an environment must fit JSON, those of {name} do not ({error}): choose another"
        ) from error
    file.write_text("".join(lines))
    return len(lines)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the nulls that Arrow adds to messages which lack a key."""
    messages = [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in row["prompt"]
    ]
    return {**row, "prompt": messages}


def _quiet(*_: object) -> None:
    """Report nothing: the run has its own progress."""


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
    from hybrid_rlhf.runtime.command_line import user_errors

    with user_errors():
        main(sys.argv[1:])
