"""A sweep of GRPO over learning rates and seeds: four runs that sample and learn together on one base.

python examples/adapters.py [--model MODEL] [--output_dir FOLDER]

Each run has a folder with its adapter, optimizer and metrics; the same command continues runs that were stopped.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.engines.adapters import AdapterEngine, AdapterRow
from hybrid_rlhf.functional.losses import ppo_policy_loss
from hybrid_rlhf.generation import Completion, GenerationEngine, SamplingParams
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import default_device, solo_world

TOPICS = ("the sea", "a garden", "winter", "music")
RUNS = {f"lr{rate:g}_seed{seed}": (rate, seed) for rate in (1e-4, 1e-3) for seed in (0, 1)}
STEPS = 2
SAMPLES = 4


def different_letters(completion: str) -> float:
    """Share of different characters among the characters of a completion."""
    return len(set(completion)) / max(len(completion), 1)


def loss(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantage: float) -> Tensor:
    """GRPO's clipped surrogate of a row, whose share of a step is its share of the completions."""
    advantages = torch.full_like(logprobs, advantage)
    masked = {"old_logprobs": old_logprobs.to(logprobs.device), "mask": mask.to(logprobs.device)}
    clipped = ppo_policy_loss(logprobs, **masked, advantages=advantages, clip_low=0.2, clip_high=0.2)
    return clipped.total / (int(mask.sum()) * len(TOPICS) * SAMPLES)


def row_of(name: str, prompt: list[int], completion: Completion, advantage: float) -> AdapterRow:
    """A completion as a row of its run."""
    ids = torch.tensor(prompt + completion.token_ids)
    mask = torch.arange(len(ids) - 1) >= len(prompt) - 1
    old_logprobs = torch.zeros(len(mask)).masked_scatter(mask, torch.tensor(completion.logprobs))
    row_loss = partial(loss, mask=mask, old_logprobs=old_logprobs, advantage=advantage)
    return AdapterRow(name, ids[:-1], ids[1:], row_loss, mask)


def main() -> None:
    """Train all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="folder, hub name, .gguf file, or the embedded model")
    parser.add_argument("--output_dir", default="output/example_adapters", type=Path)
    options = parser.parse_args()
    world = solo_world(default_device())
    tokenizer = load_tokenizer(resolve_model(options.model, world=world))
    engine = AdapterEngine.from_pretrained(options.model, world=world)
    generation = GenerationEngine.from_model(engine.lm, tokenizer=tokenizer, cuda_graphs=False)
    texts = [[{"role": "user", "content": f"Write a line about {topic}."}] for topic in TOPICS]
    prompts = [tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False) for text in texts]
    for name, (_, seed) in RUNS.items():
        adapter = options.output_dir / name / "adapter"
        adapter.parent.mkdir(parents=True, exist_ok=True)
        if adapter.exists():
            engine.load(name, adapter, with_optimizer=True)
        else:
            engine.add(name, LoraConfig(rank=8), seed=seed)
    while names := [name for name in RUNS if engine.steps(name) < STEPS]:
        for name in names:
            generation.set_adapter(name, engine.factors(name))
        work = [(name, prompt) for name in names for prompt in prompts]
        seeds = [1000 * RUNS[name][1] + engine.steps(name) for name, _ in work]
        sampling = [SamplingParams(max_new_tokens=24, n=SAMPLES, seed=seed) for seed in seeds]
        groups = generation.generate([prompt for _, prompt in work], sampling, adapters=[name for name, _ in work])
        rows = []
        scores: dict[str, list[float]] = {name: [] for name in names}
        for (name, prompt), group in zip(work, groups, strict=True):
            rewards = torch.tensor([different_letters(tokenizer.decode(sample.token_ids)) for sample in group])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            rows += [row_of(name, prompt, *pair) for pair in zip(group, advantages.tolist(), strict=True)]
            scores[name] += rewards.tolist()
        results = engine.forward_backward(rows)
        for name in names:
            losses = [result.loss or 0.0 for row, result in zip(rows, results, strict=True) if row.adapter == name]
            metrics = {"loss/policy": sum(losses), "objective/scores": sum(scores[name]) / len(scores[name])}
            metrics |= engine.step(name, AdamStep(lr=RUNS[name][0], max_grad_norm=1.0))
            engine.save(name, options.output_dir / name / "adapter", with_optimizer=True)
            with (options.output_dir / name / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")
            print(f"{name}: step {metrics['step']:.0f}, mean score {metrics['objective/scores']:.3f}")


if __name__ == "__main__":
    main()
