"""Problems of reasoning-gym (arXiv 2505.24760), generated and scored by that library.

    python -m hybrid_rlhf.rl.environments.reasoning_gym chain_sum rows.jsonl 1000

writes rows for `data.sources`. A row identifies its problem by data set, seed and index, from which the library
generates it again. The answer is the text in `<answer>` tags, or else the whole completion.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.rl.environments.environment import StepResult, new_rows_file, read_settings, with_instruction
from hybrid_rlhf.runtime.command_line import user_errors
from hybrid_rlhf.runtime.output import print_result

with user_errors() if __name__ == "__main__" else contextlib.nullcontext():
    try:
        import reasoning_gym
        from reasoning_gym.utils import extract_answer
    except ImportError as error:
        raise UserError(
            f"the environment reasoning_gym needs the library reasoning-gym, which cannot be imported ({error}): "
            "pip install 'hybrid_rlhf[environments]'"
        ) from error

INSTRUCTION = "Give the final answer as <answer>answer</answer>."


class ReasoningGym:
    """One problem, with one attempt or several."""

    def __init__(self, *, tries: int = 1, instruction: str = INSTRUCTION) -> None:
        """Take the number of attempts, and the instruction below the problem."""
        if tries < 1:
            raise ValueError(f"tries must be 1 or more, got {tries}")
        self._left = tries
        self._instruction = instruction

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the prompt of the row with the instruction."""
        missing = [name for name in ("prompt", "dataset", "size", "seed", "settings", "index") if name not in row]
        if missing:
            raise UserError(
                f"rows of the environment reasoning_gym must have what its writer writes, got one without "
                f"{', '.join(missing)}: write them with python -m hybrid_rlhf.rl.environments.reasoning_gym"
            )
        self._problems = problems(row["dataset"], int(row["size"]), int(row["seed"]), json.dumps(row["settings"]))
        self._problem = self._problems[int(row["index"])]
        return with_instruction(row["prompt"], self._instruction)

    def step(self, completion: str) -> StepResult:
        """Score an answer in [0, 1]; of several attempts the last one counts."""
        answer = extract_answer(completion)
        answer = completion.strip() if answer is None else answer
        self._score = float(self._problems.score_answer(answer, self._problem))
        self._left -= 1
        if self._score >= 1 or not self._left:
            return StepResult(None, self._score, True)
        return StepResult("That is not right. Try again.", 0.0, False)

    def truncated(self) -> float:
        """The score of the last attempt, where limits of the episode leave no other."""
        return self._score


@functools.lru_cache(maxsize=64)
def problems(dataset: str, size: int, seed: int, settings: str) -> Any:
    """A data set of the library, by name and settings as JSON.

    Raises:
        UserError: when the library has no such data set, or rejects the settings.
    """
    try:
        return reasoning_gym.create_dataset(dataset, size=size, seed=seed, **json.loads(settings))
    except Exception as error:  # noqa: BLE001 - data sets raise assertion, type and value errors
        raise UserError(
            f"reasoning_gym must have the data set with its settings, {dataset} with {settings} fails ({error}): "
            "reasoning_gym.factory.DATASETS lists the data sets"
        ) from error


def write_rows(dataset: str, file: Path, *, size: int, seed: int = 0, **settings: Any) -> None:
    """Write problems as JSONL for data.sources.

    Args:
        dataset: name of a data set of the library.
        file: path of the file.
        size: number of problems.
        seed: seed of the library's generator.
        settings: settings of the data set, as in its config class.
    """
    named = {"dataset": dataset, "size": size, "seed": seed, "settings": settings}
    made = problems(dataset, size, seed, json.dumps(settings))
    rows = ({"prompt": made[index]["question"], "index": index, **named} for index in range(size))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(words: list[str]) -> None:
    """Write the rows of a data set; the arguments are DATASET FILE SIZE [SEED] [SETTINGS as JSON]."""
    if len(words) not in (3, 4, 5) or not all(word.isdigit() for word in words[2:4]):
        raise UserError(
            f"the line must be DATASET FILE.jsonl SIZE [SEED] [SETTINGS as JSON], got {' '.join(words)!r}: write these "
            "words"
        )
    settings = read_settings(words[4]) if len(words) == 5 else {}
    file = new_rows_file(words[1])
    size = int(words[2])
    write_rows(words[0], file, size=size, seed=int(words[3]) if len(words) > 3 else 0, **settings)
    print_result({"rows": size, "file": str(file)}, f"{size} rows in {file}")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
