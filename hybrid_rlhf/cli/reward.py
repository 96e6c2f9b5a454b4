"""`hybrid-rlhf reward`: step 2, a reward model, in this process or under a launcher."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.runtime.command_line import parse_config, user_errors
from hybrid_rlhf.runtime.liveness.launcher import stop_with_launcher


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Parse, then run; torch is imported after parsing, so that --help is fast."""
    with user_errors():
        stop_with_launcher()
        config = parse_config(RewardConfig, argv, prog=prog)
        from hybrid_rlhf.cli.train import print_run
        from hybrid_rlhf.supervised.build import run_reward

        run_reward(config)
        print_run(config.output_dir)


if __name__ == "__main__":
    main()
