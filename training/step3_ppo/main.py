"""Step 3 from a checkout, under python, torchrun or deepspeed: `training/step3_ppo/main.py --config FILE.yaml`."""

from hybrid_rlhf.cli.rl import main

if __name__ == "__main__":
    main()
