"""`hybrid-rlhf sft`: step 1, supervised fine-tuning or distillation, in this process or under a launcher."""

from __future__ import annotations

from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.command_line import command


@command(SFTConfig, is_rank=True)
def main(config: SFTConfig) -> None:
    """Run the step, and print its run."""
    from hybrid_rlhf.cli.train import print_run
    from hybrid_rlhf.supervised_step import run_sft

    run_sft(config)
    print_run(config.output_dir)


if __name__ == "__main__":
    main()
