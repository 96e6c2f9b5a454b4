"""Files and functions that one GRPO step enters, and calls that receive the config before the first model.

    python -m benchmarks.traced_step [--list] [--algorithm ppo]

Why: a reader of a step opens these files, and one who looks for where a model is built follows the config. The second
step of a tiny Llama is traced on the CPU, all threads included; files without a function that is entered do not count,
nor do modules while they are imported. Of the calls until the first model is built, those count that receive the run's
config, or one derived from it, as an argument; methods of the config itself do not.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self
from unittest import mock

import hybrid_rlhf
from hybrid_rlhf import RL
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.rl.roles import building
from hybrid_rlhf.rl.trainer import RLTrainer
from tests.support.tiny import tiny_model, tiny_tokenizer

LIBRARY = f"{Path(hybrid_rlhf.__file__).parent}/"


def even(completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(len(text) % 2 == 0) for text in completions]


class Trace:
    """Counts the functions of the library that are entered while it is on, by file and qualified name."""

    def __init__(self, *, receiving: type | None = None) -> None:
        """Count all calls, or those that receive an object of a type as an argument."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self._receiving = receiving

    def __enter__(self) -> Self:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY) and code.co_name != "<module>":
            place = code.co_filename.removeprefix(LIBRARY)
            if self._receiving is None or self._receives(frame, place):
                self.calls[place, code.co_qualname] += 1

    def _receives(self, frame: FrameType, place: str) -> bool:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals.get(name) for name in names if name != "self"]
        assert self._receiving is not None
        return not place.startswith("configs/") and any(isinstance(value, self._receiving) for value in given)


class _Built(Exception):
    """The first model is about to be built."""


def traced_start(algorithm: str, folder: Path) -> Trace:
    """The trace of a run until its first model, of calls that receive the config."""
    trace = Trace(receiving=RLConfig)

    def stop(*_: Any, **__: Any) -> None:
        raise _Built

    with mock.patch.object(building, "build_actor", stop), contextlib.suppress(_Built), trace:
        run_of(algorithm, folder)
    return trace


def traced(algorithm: str, folder: Path) -> Trace:
    """The trace of the second step of a run."""
    trace, step = Trace(), RLTrainer.step

    def traced_step(trainer: RLTrainer, number: int) -> dict[str, float]:
        if number != 2:
            return step(trainer, number)
        with trace:
            return step(trainer, number)

    with mock.patch.object(RLTrainer, "step", traced_step):
        run_of(algorithm, folder)
    return trace


def run_of(algorithm: str, folder: Path) -> None:
    """Train a tiny model for two steps."""
    for part in (tiny_model(seed=0), tiny_tokenizer()):
        part.save_pretrained(folder / "model")
    RL(
        model=folder / "model",
        data=[{"prompt": f"say {number}"} for number in range(32)],
        output_dir=str(folder / "run"),
        algorithm=algorithm,
        reward=even,
        rollout={"prompts_per_step": 8, "max_prompt_tokens": 48, "sampling": {"n": 4, "max_new_tokens": 8}},
        train={"max_steps": 2},
        logging={"sinks": []},
    ).train()


def main() -> None:
    """Print the counts, and with --list the files with the number of their functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = traced_start(options.algorithm, Path(folder) / "start")
        trace = traced(options.algorithm, Path(folder) / "step")
    functions = [entry for entry in trace.calls if "<" not in entry[1].rpartition(".")[2]]
    files = Counter(file for file, _ in functions)
    if options.list:
        print("\n".join(f"{count:4} {place}:{name}" for (place, name), count in start.calls.items()))
        print("\n".join(f"{count:4} {file}" for file, count in sorted(files.items())))
    print(f"{options.algorithm}: {start.calls.total()} calls receive the config before the first model")
    print(f"{options.algorithm}: {len(files)} files, {len(functions)} functions, {trace.calls.total()} calls")


if __name__ == "__main__":
    main()
