"""Complete a file of prompts from a checkout: `python inference/generate.py MODEL --input FILE --output FILE`."""

from hybrid_rlhf.cli.saved_models.generate import main

if __name__ == "__main__":
    main()
