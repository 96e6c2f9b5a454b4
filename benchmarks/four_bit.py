"""Rollouts over 4-bit base weights, beside adapters over whole weights (docs/scaling.md).

    python -m benchmarks.four_bit                      # SmolLM2-135M, bfloat16, 32 rows
    python -m benchmarks.four_bit --dtype float32

Both actors run by turns in one process: a rollout of `rows` completions of `new_tokens` each, with its weight sync.
Medians of several after a warm-up, and bytes of the weights of the layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch

from benchmarks.generation import load
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.runtime.world import close_world, init_world


def main() -> None:
    """Measure both, and print ratios."""
    options = parse()
    world = init_world()
    with tempfile.TemporaryDirectory() as folder:
        load(options.model).to("cpu").save_pretrained(folder)
        actors = {}
        for name, quantization in (("whole", None), ("4 bits", "nf4")):
            model = ModelConfig(dtype=options.dtype, quantization=quantization)  # type: ignore[arg-type]
            lora = LoraConfig(rank=16)
            spec = EngineSpec("actor", folder, model, ZeroConfig(), 0, OptimizerConfig(lr=1e-4), lora)
            actors[name] = build_actor(spec, world)
    seconds: dict[str, list[float]] = {name: [] for name in actors}
    for number in range(options.runs + 1):
        for name, actor in actors.items():
            measured = rollout_seconds(actor, options)
            if number:  # the first run warms up
                seconds[name].append(measured)
    results = {
        name: {
            "rollout_seconds": statistics.median(of_actor),
            "rollout_runs": of_actor,
            "layer_bytes": layer_bytes(actors[name]),
        }
        for name, of_actor in seconds.items()
    }
    ratios: dict[str, float] = {
        key: results["4 bits"][key] / results["whole"][key] for key in ("rollout_seconds", "layer_bytes")
    }
    print(json.dumps({"options": vars(options), "torch": torch.__version__, **results, "4 bits / whole": ratios}))
    close_world()


def rollout_seconds(actor: HybridEngine, options: argparse.Namespace) -> float:
    """Time of a rollout with its weight sync."""
    prompts = [[5 + row, 6, 7, 8] for row in range(options.rows)]
    sampling = SamplingParams(max_new_tokens=options.new_tokens, seed=0)
    start = time.perf_counter()
    with actor.inference(stop_token_ids=()) as generation:
        generation.generate(prompts, sampling)
    return time.perf_counter() - start


def layer_bytes(actor: HybridEngine) -> int:
    """Bytes of the base weights in the layers, with their scales."""
    total = 0
    for name, weight in actor.lm.named_parameters():
        if ".layers." in name and ".lora_" not in name:
            state = getattr(weight, "quant_state", None)
            total += weight.nbytes + (0 if state is None else state.absmax.nbytes + state.state2.absmax.nbytes)
    return total


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
