"""Chat with a model from a checkout: `python inference/chat.py output/step3_ppo/actor`."""

from hybrid_rlhf.cli.saved_models.chat import main

if __name__ == "__main__":
    main()
