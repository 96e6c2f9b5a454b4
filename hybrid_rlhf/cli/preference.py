"""`hybrid-rlhf preference`: DPO and other preference losses, in this process or under a launcher."""

from __future__ import annotations

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.runtime.command_line import command


@command(PreferenceStepConfig, is_rank=True)
def main(config: PreferenceStepConfig) -> None:
    """Run the step, and print its run."""
    from hybrid_rlhf.cli.train import print_run
    from hybrid_rlhf.supervised_step import run_preference

    run_preference(config)
    print_run(config.output_dir)


if __name__ == "__main__":
    main()
