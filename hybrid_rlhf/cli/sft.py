"""`hybrid-rlhf sft`: step 1, supervised fine-tuning or distillation, in this process or under a launcher."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.command_line import parse_config, user_errors
from hybrid_rlhf.runtime.liveness.launcher import stop_with_launcher


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Parse, then run; torch is imported after parsing, so that --help is fast."""
    with user_errors():
        stop_with_launcher()
        config = parse_config(SFTConfig, argv, prog=prog)
        from hybrid_rlhf.cli.train import print_run
        from hybrid_rlhf.supervised.build import run_sft

        run_sft(config)
        print_run(config.output_dir)


if __name__ == "__main__":
    main()
