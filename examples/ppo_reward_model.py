"""The three steps of InstructGPT in Python: SFT, a reward model, PPO with a critic.

python examples/ppo_reward_model.py [--model MODEL] [--output_dir FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybrid_rlhf import RL, SFT, RewardModel

TOPICS = ("the sea", "a garden", "winter", "music", "the moon", "bread", "a river", "a city")


def main() -> None:
    """Train all three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="folder, hub name, .gguf file, or the embedded model")
    parser.add_argument("--output_dir", default="output/example_ppo_reward_model")
    options = parser.parse_args()
    output = Path(options.output_dir)
    rows = [
        {"prompt": f"Say something about {topic}.", "chosen": f"I like {topic}.", "rejected": f"{topic}? No."}
        for topic in TOPICS
    ] * 4
    short = {"train": {"max_steps": 2, "global_batch_size": 8}}
    sft = SFT(model=options.model, data=rows, output_dir=str(output / "sft"), **short).train()
    start = sft.models["model"]
    reward = RewardModel(model=start, data=rows, output_dir=str(output / "reward"), **short).train()
    result = RL(
        model=start,
        data=rows,
        output_dir=str(output / "rl"),
        algorithm="ppo",
        reward=str(reward.models["model"]),
        rollout={"prompts_per_step": 8, "sampling": {"max_new_tokens": 16}},
        train={"max_steps": 2},
    ).train()
    print(f"mean score {result.metrics['objective/scores']:.3f}, actor in {result.models['actor']}")


if __name__ == "__main__":
    main()
