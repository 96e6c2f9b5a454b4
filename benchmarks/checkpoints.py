"""What a checkpoint costs: how long training stands still for it, against writing its bytes alone.

    python -m benchmarks.checkpoints --model embedded --rounds 5

Actor and critic learn, so a checkpoint of the demo's four models holds these two: weights and Adam's two states in
float32. In each round the bytes are written plainly (to as many files, and to the disk itself), then by a save that
training waits for, then by one beside training; medians are printed. Every file is removed before the next is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.generation import SHAPES, load
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.training import CheckpointConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.saved.checkpoints import CheckpointWriter, LoopState
from hybrid_rlhf.engines.saved.training_state import TrainingState
from hybrid_rlhf.runtime.world import close_world, init_world


def main() -> None:
    """Build the engines, write in turn, print."""
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        load(options.model).to("cpu").save_pretrained(folder / "model")
        world = init_world()
        states = {role: TrainingState(engine) for role, engine in engines(folder / "model", world).items()}
        size = sum(tensor.nbytes for state in states.values() for _, tensor in state.tensors())
        plain = CheckpointWriter(folder / "waits", states, world, CheckpointConfig(keep_last=1))
        beside = CheckpointWriter(folder / "beside", states, world, CheckpointConfig(keep_last=1, save_async=True))

        def save_beside(step: int) -> float:
            taken = clocked(lambda: beside.save(LoopState(step, {})))
            wait_for(lambda: beside.pending is None or beside.pending.call.has_ended())
            return taken + clocked(beside.poll)

        ways: dict[str, Callable[[int], float]] = {
            "bytes alone": lambda step: clocked(lambda: write_plainly(folder / "plain", states)),
            "training waits": lambda step: clocked(lambda: plain.save(LoopState(step, {}))),
            "beside training": save_beside,
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for step in range(1, options.rounds + 2):
            for way, save in ways.items():
                taken = save(step)
                if step > 1:  # the first touches memory that the others find
                    seconds[way].append(taken)
                for part in ("plain", "waits", "beside"):
                    shutil.rmtree(folder / part, ignore_errors=True)
        report(seconds, size, options.output)
        close_world()


def engines(model: Path, world: object) -> dict[str, object]:
    """Actor and critic as the demo has them."""

    def spec(role: str) -> EngineSpec:
        return EngineSpec(
            role,
            str(model),
            ModelConfig(),
            ZeroConfig(),
            0,
            OptimizerConfig(),  # type: ignore[arg-type]
        )

    return {"actor": build_actor(spec("actor"), world), "critic": build_engine(spec("critic"), world)}  # type: ignore[arg-type]


def write_plainly(folder: Path, states: dict[str, TrainingState]) -> None:
    """The same bytes, without names, checksums or manifest."""
    folder.mkdir()
    for role, state in states.items():
        with (folder / role).open("wb") as file:
            for _, tensor in state.tensors():
                file.write(memoryview(tensor.cpu().numpy()).cast("B"))
            file.flush()
            os.fsync(file.fileno())


def clocked(work: Callable[[], None]) -> float:
    """Seconds that something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def wait_for(done: Callable[[], bool]) -> None:
    """Until something is done."""
    while not done():
        time.sleep(0.01)


def report(seconds: dict[str, list[float]], size: int, output: str | None) -> None:
    """Print medians, and write all figures to a file if one is named."""
    print(f"{size / 2**30:.2f} GiB, {torch.get_num_threads()} threads, torch {torch.__version__}")
    alone = statistics.median(seconds["bytes alone"])
    for way, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"{way:16} {middle:7.2f} s  {middle / alone:5.2f} x  ({', '.join(f'{value:.2f}' for value in taken)})")
    if output is not None:
        Path(output).write_text(json.dumps({"bytes": size, "seconds": seconds}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded", help=f"embedded, or one of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to be measured; none: the system's")
    parser.add_argument("--output", default=None, help="a JSON file for all figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
