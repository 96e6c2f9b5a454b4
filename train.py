"""All steps from a checkout: `python train.py`, the same as `hybrid-rlhf train`."""

from hybrid_rlhf.cli.train import main

if __name__ == "__main__":
    main()
