"""`hybrid-rlhf rl`: step 3, PPO and other RL algorithms, in this process or under a launcher."""

from __future__ import annotations

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import command


@command(RLConfig, is_rank=True)
def main(config: RLConfig) -> None:
    """Run the step, and print its run."""
    from hybrid_rlhf.cli.train import print_run
    from hybrid_rlhf.rl_step import run_rl

    run_rl(config)
    print_run(config.output_dir)


if __name__ == "__main__":
    main()
