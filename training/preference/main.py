"""Preference step from a checkout, under python, torchrun or deepspeed: `training/preference/main.py --config FILE`."""

from hybrid_rlhf.cli.preference import main

if __name__ == "__main__":
    main()
