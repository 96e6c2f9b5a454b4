"""`hybrid-rlhf reward`: step 2, a reward model, in this process or under a launcher."""

from __future__ import annotations

from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.runtime.command_line import command


@command(RewardConfig, is_rank=True)
def main(config: RewardConfig) -> None:
    """Run the step, and print its run."""
    from hybrid_rlhf.cli.train import print_run
    from hybrid_rlhf.supervised.build import run_reward

    run_reward(config)
    print_run(config.output_dir)


if __name__ == "__main__":
    main()
