"""Weight sync under ZeRO-3: this engine, DeepSpeed's plain ZeRO-3 generation, and this engine without ZeRO.

    python -m benchmarks.weight_sync --ranks 2 --model embedded --new_tokens 128
    python -m benchmarks.weight_sync --ranks 2 --sampling_ranks 2 --tensor_parallel 2 --requests 64

The second command measures a sampler on two ranks of its own, which receives the weights of two ranks that train.

Each rank completes prompts of its own. All three run in turn in one run, several times after a warm-up; the medians
of the slowest rank are printed. Times of this engine include the weight sync and the release of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import multiprocessing

from benchmarks.generation import SHAPES, load
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor
from hybrid_rlhf.engines.engine import EngineFacts
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.role_model import AbsentEngine
from hybrid_rlhf.engines.separate.sampler import SeparateSampler
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.runtime.world import World, close_world, create_groups, init_world

_UNMEASURED = 2
"""Number of first runs: they warm up, and the first two syncs to other ranks are compared by checksums."""


def main() -> None:
    """Save the model, start the ranks, print what they measured."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        load(options.model).to("cpu").save_pretrained(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        multiprocessing.spawn(rank_main, (options, folder, port), nprocs=options.ranks + options.sampling_ranks)


def rank_main(rank: int, options: argparse.Namespace, folder: str, port: int) -> None:
    """One rank, from its environment to the report."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(options.ranks + options.sampling_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(options.ranks + options.sampling_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    world = init_world()
    if options.sampling_ranks:
        measured: HybridEngine | SeparateSampler = separate_sampler(folder, world, options)
        runs: dict[str, Callable[[], None]] = {"sampler on its own ranks": lambda: rollout(measured, options)}
    else:
        zero3 = measured = actor(folder, options.stage, world, options)
        runs = {f"this engine, ZeRO-{options.stage}": lambda: rollout(zero3, options)}
        if "whole" in options.peers:
            whole = actor(folder, 0, world, options)
            runs["this engine, no ZeRO"] = lambda: rollout(whole, options)
        if "plain" in options.peers:
            runs["DeepSpeed, plain ZeRO-3"] = lambda: plain_generate(zero3, options)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    syncs, checks = list[float](), list[float]()
    first = next(iter(runs.values()))
    for number in range(options.runs + _UNMEASURED):
        for name, run in runs.items():
            took = slowest(run, world)
            if number >= _UNMEASURED:
                seconds[name].append(took)
                if run is first:
                    syncs.append(max(world.all_gather_objects(measured.weight_sync_seconds)))
                    checks.append(max(world.all_gather_objects(measured.weight_check_seconds)))
    if world.is_main:
        report(options, seconds, syncs, checks)
    close_world()


def actor(folder: str, stage: int, world: World, options: argparse.Namespace) -> HybridEngine:
    """An actor that could train."""
    spec = EngineSpec("actor", folder, ModelConfig(), ZeroConfig(stage=stage), 0, OptimizerConfig())
    return build_actor(spec, world, rollout=RolloutConfig(tensor_parallel=options.tensor_parallel))


def separate_sampler(folder: str, world: World, options: argparse.Namespace) -> SeparateSampler:
    """A sampler on the last ranks, of an actor on the others."""
    trains, samples = tuple(range(options.ranks)), tuple(range(options.ranks, world.size))
    create_groups([trains, samples])
    own, other = world.part(trains), world.part(samples)
    spec = EngineSpec("actor", folder, ModelConfig(), ZeroConfig(stage=options.stage), 0, OptimizerConfig())
    absent = AbsentEngine("actor", own, EngineFacts(packs=True))
    trained = build_actor(spec, own, samples=False) if own.is_member else absent
    rollout = RolloutConfig(tensor_parallel=options.tensor_parallel)
    return SeparateSampler(trained, world=other, rollout=rollout)


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """The same for every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.requests, options.prompt_tokens)
    return torch.randint(10, 30_000, shape, generator=generator).tolist()  # type: ignore[no-any-return]


def rollout(engine: HybridEngine | SeparateSampler, options: argparse.Namespace) -> None:
    """Weight sync, generation, release of memory."""
    with engine.other_weights(), engine.inference(stop_token_ids=()) as generation:  # sync, though nothing has changed
        if generation is not None:
            generation.generate(prompts(options), SamplingParams(max_new_tokens=options.new_tokens, seed=0))


@torch.no_grad()
def plain_generate(engine: HybridEngine, options: argparse.Namespace) -> None:
    """Hugging Face's generate on the partitioned module, DeepSpeed's hooks gathering layer by layer."""
    ids = torch.tensor(prompts(options), device=engine.device)
    engine.module.eval()
    engine.lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=options.new_tokens,
        min_new_tokens=options.new_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    engine.module.train()


def slowest(run: Callable[[], None], world: World) -> float:
    """Seconds of the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    run()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return max(world.all_gather_objects(time.perf_counter() - start))


def report(
    options: argparse.Namespace, seconds: dict[str, list[float]], syncs: list[float], checks: list[float]
) -> None:
    """A table, and JSON."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    mine = next(iter(medians.values()))
    groups = (options.sampling_ranks or options.ranks) // options.tensor_parallel
    print(
        f"{options.model}, {options.ranks} + {options.sampling_ranks} ranks, ZeRO-{options.stage}, "
        f"tensor parallel {options.tensor_parallel}, "
        f"{options.requests} prompts of {options.prompt_tokens} tokens per group, {options.new_tokens} new, "
        f"torch {torch.__version__}, median of {options.runs}"
    )
    for name, median in medians.items():
        speed = options.requests * options.new_tokens * groups / median
        print(f"{name:24s} {speed:9.1f} tokens/s  {median:8.3f} s   this engine is {median / mine:.2f} x as fast")
    for name, times in (("weight sync and release", syncs), ("check after it", checks)):
        median = statistics.median(times)
        print(f"{name}: {median:.3f} s, {100 * median / mine:.1f}% of its rollout")
    if options.json:
        content = {
            "options": vars(options),
            "seconds": seconds,
            "weight_sync_seconds": syncs,
            "weight_check_seconds": checks,
        }
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help=f"embedded, a folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sampling_ranks", type=int, default=0, help="further ranks, which alone sample")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage")
    parser.add_argument("--tensor_parallel", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16, help="prompts of each tensor-parallel group")
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["whole", "plain"],
        choices=["whole", "plain"],
        help="whole: this engine without ZeRO; plain: DeepSpeed's own, which is slow",
    )
    parser.add_argument("--json", help="file for the raw times")
    return parser.parse_args()


if __name__ == "__main__":
    main()
