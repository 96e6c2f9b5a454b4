"""A critic-free step beside a PPO step, at equal tokens: time and memory.

    python -m benchmarks.critic_free                                        # PPO against RLOO without a KL
    python -m benchmarks.critic_free --algorithm grpo --samples 4           # with a reference, KL in the loss

All roles are SmolLM2-135M, trained whole, in one process: actor, critic, reward model and reference for PPO; actor and
reward model, and a reference where the algorithm's KL has a coefficient, for the other. Learning rates are 0, so that
both go on sampling the very same tokens from the same prompts; an update does all of its work. Steps alternate; medians
after a warm-up are printed, and the ratio. Memory is that of live tensors (planning/live_bytes.py): what is held after
a step, and the most in a step, each side built and counted alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.training import MicroBatches, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.rl.rewards import Reward
from hybrid_rlhf.rl.rewards.models import ModelReward
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World, init_world

GIB = 2**30


def main() -> None:
    """Build both sides, step in turn, print."""
    options = parse()
    world = init_world()
    path = resolve_model(options.model, world=world)
    memory = {name: memory_of(name, path, world, options) for name in ("ppo", options.algorithm)}
    steps = {name: step_of(name, path, world, options)[0] for name in memory}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    tokens = {}
    for round_number in range(options.warmup + options.steps):
        for name, step in steps.items():
            start = time.perf_counter()
            tokens[name] = step(round_number)
            if round_number >= options.warmup:
                seconds[name].append(time.perf_counter() - start)
    assert len(set(tokens.values())) == 1, f"both sides learn from the same tokens: {tokens}"
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{options.prompts} prompts x {options.samples} completions, {tokens['ppo']} real tokens in the last step; "
        f"{options.steps} steps after {options.warmup}, in turn"
    )
    for name in steps:
        held, peak = memory[name]
        print(
            f"{name:24} {medians[name]:7.2f} s a step ({min(seconds[name]):.2f} to {max(seconds[name]):.2f}), "
            f"{held / GIB:.2f} GiB held, {peak / GIB:.2f} GiB at most"
        )
    own = options.algorithm
    print(
        f"{own} / ppo: time {medians[own] / medians['ppo']:.2f}, held {memory[own][0] / memory['ppo'][0]:.2f}, "
        f"peak {memory[own][1] / memory['ppo'][1]:.2f}"
    )
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "machine": platform.processor() or platform.machine(),
                "threads": torch.get_num_threads(),
                "seconds": seconds,
                **vars(options),
            }
        )
    )


def step_of(
    name: str, path: str, world: World, options: argparse.Namespace
) -> tuple[Callable[[int], float], list[torch.nn.Module]]:
    """A function that runs a step and gives its real tokens, and the modules of the side."""
    config = parse_config(
        RLConfig,
        [
            "--algorithm",
            name,
            "--rollout.sampling.n",
            str(options.samples),
            "--rollout.prompts_per_step",
            str(options.prompts),
            "--rollout.sampling.max_new_tokens",
            str(options.new_tokens),
            "--reward.components",
            path,
            *([] if options.keep_kl or name == "ppo" else ["--algorithm.kl", "null"]),
        ],
    )
    still = OptimizerConfig(lr=0.0, schedule="constant", warmup_fraction=0.0)

    def spec(role: Any, optimizer: OptimizerConfig | None) -> EngineSpec:
        return EngineSpec(
            role,
            path,
            ModelConfig(dtype=options.dtype, gradient_checkpointing=options.checkpointing),
            ZeroConfig(),
            0,
            optimizer,
        )

    actor = build_actor(spec("actor", still), world, rollout=config.rollout)
    critic = build_engine(spec("critic", still), world) if config.critic is not None else None
    judge = build_engine(spec("reward", None), world)
    reference = build_engine(spec("reference", None), world) if config.uses_reference else None
    reward = Reward([ModelReward(RewardComponentConfig(model="judge"), judge)], world)
    roles = Roles(world, actor, reward, critic, reference)
    algorithm = ALGORITHMS[name](config.algorithm, value_lam=config.critic.gae_lambda if config.critic else 1.0)
    tokenizer = load_tokenizer(path)
    sampler = RolloutSampler(
        actor,
        config.rollout,
        world=world,
        stop_token_ids=(int(tokenizer.eos_token_id),),  # type: ignore[arg-type]
        seed=0,
        timers=Timers(world.device),
        tokenizer=tokenizer,
    )
    parts = RLParts.of(roles, algorithm, sampler, micro_batches=MicroBatches(None, options.micro_batch_tokens))

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        shape = (options.prompts, options.prompt_tokens)
        ids = torch.randint(100, len(tokenizer), shape, generator=generator)
        prompts = [{"input_ids": row} for row in ids.tolist()]
        kl_coef = 0.0 if config.algorithm.kl is None else config.algorithm.kl.coef
        rollout = parts.scorer.score(prompts, parts.sampler.sample(prompts, step=number))
        plan = parts.planner.plan(rollout, step=number)
        batch = parts.estimate(parts.scorer.compute_logprobs(rollout, plan), kl_coef=kl_coef)
        parts.updater.update(batch, [plan], kl_coef=kl_coef)
        return float(rollout.lengths.sum())

    engines = [engine for engine in (actor, critic, judge, reference) if engine is not None]
    return step, [engine.module for engine in engines]


def memory_of(name: str, path: str, world: World, options: argparse.Namespace) -> tuple[int, int]:
    """Bytes of live tensors after a step, and at most in it."""
    counter = LiveBytes(world.device.type)
    with counter:
        step, modules = step_of(name, path, world, options)
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                counter.count(tensor)
        step(0)
        gc.collect()
        counter.restart()
        held = counter.live
        step(1)
        return held, counter.peak


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="rloo", choices=[name for name in ALGORITHMS if name != "ppo"])
    parser.add_argument("--keep_kl", action="store_true", help="the algorithm's own KL coefficient, and a reference")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed again in backward")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--micro_batch_tokens", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
