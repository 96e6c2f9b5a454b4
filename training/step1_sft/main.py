"""Step 1 from a checkout, under python, torchrun or deepspeed: `training/step1_sft/main.py --config FILE.yaml`."""

from hybrid_rlhf.cli.sft import main

if __name__ == "__main__":
    main()
