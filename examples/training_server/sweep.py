"""A sweep of GRPO runs through the training server: an adapter for each run, all in the same packed batches.

    hybrid-rlhf train-server embedded --model_name smollm2 --output_dir output/sweep
    pip install tinker jinja2
    export TINKER_BASE_URL=http://127.0.0.1:8077 TINKER_API_KEY=tml-anything-here
    python examples/training_server/sweep.py smollm2 [--steps 2]

Each run is a loop in a thread of this client; the server computes together what the loops wait for.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean
from typing import Any

import tinker
from tinker import types

TOPICS = ("the sea", "a garden", "winter", "music")
COMPLETIONS = 4


@dataclass(frozen=True)
class Run:
    """What differs between the runs."""

    name: str
    lr: float
    rank: int = 8
    seed: int = 0


RUNS = (Run("lr_1e-4", 1e-4), Run("lr_1e-3", 1e-3), Run("lr_1e-3_seed_1", 1e-3, seed=1), Run("rank_32", 3e-4, rank=32))


def different_words(text: str) -> float:
    """The reward: the share of different words among the words of a completion."""
    words = text.lower().split()
    return len(set(words)) / max(len(words), 1)


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """A completion of a prompt, whose tokens have one advantage; those of the prompt have none."""
    before = [0.0] * (len(prompt) - 1)
    whole = [*prompt, *tokens]
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": whole[1:],
            "logprobs": [*before, *logprobs],
            "advantages": [*before, *[advantage] * len(tokens)],
        },
    )


def train(service: tinker.ServiceClient, model: str, run: Run, steps: int) -> dict[str, Any]:
    """Mean rewards of the steps of a run, and the path of its adapter on the server."""
    trainer = service.create_lora_training_client(base_model=model, rank=run.rank, seed=run.seed).result()
    tokenizer = trainer.get_tokenizer()
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Write a line about {topic}."}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for topic in TOPICS
    ]
    scores = []
    for step in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sampling = types.SamplingParams(max_tokens=16, seed=1000 * run.seed + step)
        waiting = [
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=COMPLETIONS, sampling_params=sampling)
            for prompt in prompts
        ]
        rows = []
        for prompt, answer in zip(prompts, waiting, strict=True):
            sampled = answer.result().sequences
            rewards = [different_words(tokenizer.decode(one.tokens)) for one in sampled]
            scores.append(mean(rewards))
            rows += [
                datum(prompt, one.tokens, one.logprobs, reward - mean(rewards))
                for one, reward in zip(sampled, rewards, strict=True)
            ]
        trainer.forward_backward(rows, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=run.lr)).result()
    of_steps = [mean(scores[first : first + len(TOPICS)]) for first in range(0, len(scores), len(TOPICS))]
    return {"scores": of_steps, "adapter": trainer.save_weights_for_sampler(run.name).result().path}


def main() -> None:
    """Train all runs at once, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of the model that the server trains")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    service = tinker.ServiceClient()
    with ThreadPoolExecutor(len(RUNS)) as pool:
        results = list(pool.map(lambda run: train(service, options.model, run, options.steps), RUNS))
    service.close("success").result()
    for run, result in zip(RUNS, results, strict=True):
        print(json.dumps({"run": run.name, **result}))


if __name__ == "__main__":
    main()
