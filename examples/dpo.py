"""DPO on preference pairs: short answers are chosen, long ones rejected.

python examples/dpo.py [--model MODEL] [--output_dir FOLDER]
"""

from __future__ import annotations

import argparse

from hybrid_rlhf import PreferenceTuning

ANSWERS = {
    "What is the capital of France?": "Paris.",
    "How many days are in a week?": "Seven.",
    "What color is the sky?": "Blue.",
    "Who wrote Hamlet?": "William Shakespeare.",
}


def main() -> None:
    """Train on preference pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="folder, hub name, .gguf file, or the embedded model")
    parser.add_argument("--output_dir", default="output/example_dpo")
    options = parser.parse_args()
    rows = [
        {
            "prompt": question,
            "chosen": answer,
            "rejected": f"Well, regarding '{question}' one could say a lot.",
        }
        for question, answer in ANSWERS.items()
    ] * 4
    result = PreferenceTuning(
        model=options.model,
        data=rows,
        output_dir=options.output_dir,
        algorithm={"name": "dpo", "beta": 0.1},
        optimizer={"lr": 1e-5},
        train={"global_batch_size": 4},
    ).train()
    print(f"accuracy on the pairs {result.metrics['preference/accuracy']:.2f}, model in {result.models['model']}")


if __name__ == "__main__":
    main()
