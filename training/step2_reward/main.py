"""Step 2 alone: python, torchrun or the deepspeed launcher, `training/step2_reward/main.py --config FILE.yaml`."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.configs.cli import parse_config, user_errors
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.runtime.launcher import stop_with_launcher


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, then run; torch is imported only after parsing, so that --help is quick."""
    with user_errors():
        stop_with_launcher()
        config = parse_config(RewardConfig, argv)
        from hybrid_rlhf.algorithms.supervised_wiring import run_reward

        run_reward(config)


if __name__ == "__main__":
    main()
