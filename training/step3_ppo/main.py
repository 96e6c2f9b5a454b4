"""Step 3 alone: python, torchrun or the deepspeed launcher, `training/step3_ppo/main.py --config FILE.yaml`."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.configs.cli import parse_config, user_errors
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.runtime.launcher import stop_with_launcher


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, then run; torch is imported only after parsing, so that --help is quick."""
    with user_errors():
        stop_with_launcher()
        config = parse_config(PPOConfig, argv)
        from hybrid_rlhf.algorithms.on_policy_wiring import run_on_policy

        run_on_policy(config)


if __name__ == "__main__":
    main()
