"""GRPO with a Python function as the reward: the share of different words in a completion.

python examples/grpo_function.py [--model MODEL] [--output_dir FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hybrid_rlhf import RL

TOPICS = ("the sea", "a garden", "winter", "music", "the moon", "bread", "a river", "a city")


def different_words(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """Share of different words among the words of a completion."""
    words = [completion.lower().split() for completion in completions]
    return [len(set(each)) / max(len(each), 1) for each in words]


def main() -> None:
    """Train with GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="folder, hub name, .gguf file, or the embedded model")
    parser.add_argument("--output_dir", default="output/example_grpo_function")
    options = parser.parse_args()
    result = RL(
        model=options.model,
        data=[{"prompt": f"Write a line about {topic}."} for topic in TOPICS * 4],
        output_dir=options.output_dir,
        algorithm="grpo",
        reward=different_words,
        rollout={"prompts_per_step": 4, "sampling": {"n": 4, "max_new_tokens": 24}},
        train={"max_steps": 2},
    ).train()
    print(f"mean score {result.metrics['objective/scores']:.3f}, model in {result.models['actor']}")


if __name__ == "__main__":
    main()
