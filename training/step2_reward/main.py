"""Step 2 from a checkout, under python, torchrun or deepspeed: `training/step2_reward/main.py --config FILE.yaml`."""

from hybrid_rlhf.cli.reward import main

if __name__ == "__main__":
    main()
