"""Supervised fine-tuning on ten rows.

python examples/sft.py [--model MODEL] [--output_dir FOLDER]
"""

from __future__ import annotations

import argparse

from hybrid_rlhf import SFT

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
}


def main() -> None:
    """Train on ten rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="folder, hub name, .gguf file, or the embedded model")
    parser.add_argument("--output_dir", default="output/example_sft")
    options = parser.parse_args()
    rows = [{"prompt": f"What is the capital of {country}?", "completion": city} for country, city in CAPITALS.items()]
    result = SFT(
        model=options.model,
        data=rows,
        output_dir=options.output_dir,
        optimizer={"lr": 1e-4},
        train={"global_batch_size": 5, "epochs": 3},
    ).train()
    print(f"perplexity {result.metrics['sft/perplexity']:.2f}, model in {result.models['model']}")


if __name__ == "__main__":
    main()
