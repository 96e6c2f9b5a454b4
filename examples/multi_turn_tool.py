"""Multi-turn RL with a tool: the actor may look a number up before it answers.

python examples/multi_turn_tool.py [--model MODEL] [--output_dir FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf import RL

PRICES = {"apple": 3, "pear": 4, "plum": 7, "fig": 9}


class PriceList:
    """One question about a price. `<price>NAME</price>` looks it up, `<answer>NUMBER</answer>` ends the episode."""

    stop_strings = ("</price>", "</answer>")

    def reset(self, row: Mapping[str, Any]) -> str:
        """The question."""
        self._item = row["item"]
        return f"How much is one {self._item}? Use <price>NAME</price>, then write <answer>NUMBER</answer>."

    def step(self, completion: str) -> tuple[str | None, float, bool]:
        """Observation, reward, and whether the episode is done."""
        if "</answer>" in completion:
            return None, float(f"<answer>{PRICES[self._item]}</answer>" in completion), True
        found = [name for name in PRICES if f"<price>{name}</price>" in completion]
        return (str(PRICES[found[-1]]) if found else "no such item"), 0.0, False


def main() -> None:
    """Train with a tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="folder, hub name, .gguf file, or the embedded model")
    parser.add_argument("--output_dir", default="output/example_multi_turn_tool")
    options = parser.parse_args()
    result = RL(
        model=options.model,
        data=[{"prompt": f"price of {item}", "item": item} for item in PRICES] * 4,
        output_dir=options.output_dir,
        algorithm="grpo",
        environment=PriceList,
        rollout={"prompts_per_step": 4, "sampling": {"n": 4, "max_new_tokens": 64}},
        train={"max_steps": 2},
    ).train()
    print(f"turns per episode {result.metrics['environment/turns']:.1f}, model in {result.models['actor']}")


if __name__ == "__main__":
    main()
