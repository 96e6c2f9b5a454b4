"""Writes GSM8K (Cobbe et al. 2021, arXiv 2110.14168) as rows of `prompt` and `answer`.

python recipes/prepare_gsm8k.py OUTPUT.jsonl [--source FILE.jsonl] [--split test] [--instruction TEXT]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INSTRUCTION = "Think step by step, and end with the result as a number."


def converted(row: Mapping[str, Any], instruction: str = INSTRUCTION) -> dict[str, str]:
    """A row of GSM8K, whose answer ends with `#### NUMBER`, as a row for RL."""
    number = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": f"{row['question']}\n{instruction}".rstrip(), "answer": number}


def main() -> None:
    """Read the rows from the hub, or from a file, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", type=Path, help="a file of GSM8K's repository; without it the hub's openai/gsm8k")
    parser.add_argument("--split", default="train", help="train or test, of the hub")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text after each question")
    options = parser.parse_args()
    if options.output.exists():
        print(f"{options.output} exists and is kept")
        return
    rows: Iterable[Mapping[str, Any]]
    if options.source is not None:
        rows = map(json.loads, options.source.read_text(encoding="utf-8").splitlines())
    else:
        from datasets import load_dataset

        rows = load_dataset("openai/gsm8k", "main", split=options.split)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("x", encoding="utf-8") as file:
        file.writelines(json.dumps(converted(row, options.instruction)) + "\n" for row in rows)


if __name__ == "__main__":
    main()
