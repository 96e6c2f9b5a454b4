"""Step 1 alone: python, torchrun or the deepspeed launcher, `training/step1_sft/main.py --config FILE.yaml`."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.configs.cli import parse_config, user_errors
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.launcher import stop_with_launcher


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, then run; torch is imported only after parsing, so that --help is quick."""
    with user_errors():
        stop_with_launcher()
        config = parse_config(SFTConfig, argv)
        from hybrid_rlhf.algorithms.supervised_wiring import run_sft

        run_sft(config)


if __name__ == "__main__":
    main()
