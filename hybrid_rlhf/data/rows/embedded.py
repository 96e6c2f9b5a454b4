"""The data set of the demo: English question-answer pairs of the package chatterbot-corpus, as a JSONL file.

The chosen completion of a pair is the answer in the corpus, the rejected one the answer to another question, so the
reward model learns whether an answer matches its question.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybrid_rlhf.configs.errors import UserError

SYSTEM_PROMPT = "Answer briefly."
"""First turn of every conversation; shorter than the default of the model's template, so that training is cheaper."""
_PACKAGE = "chatterbot_corpus"


def write_demo_data(folder: Path, *, seed: int) -> Path:
    """Write folder/pairs.jsonl with `prompt`, `chosen`, `rejected` and `score`, one row per pair of the corpus.

    One file serves all steps: SFT uses prompts and chosen completions, the reward model the pairs, RL the prompts. The
    score, for conditional SFT, is the number of words of the chosen completion: the highest bucket gives long ones.

    Raises:
        UserError: if the package is not installed.
    """
    pairs = sorted(set(_question_answers()))
    rng = np.random.default_rng(seed)
    permutation = rng.permutation(len(pairs))
    rows = []
    for index, (question, answer) in enumerate(pairs):
        rejected = int(permutation[index])
        while pairs[rejected][0] == question or pairs[rejected][1] == answer:
            rejected = int(rng.integers(len(pairs)))
        prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        rows.append({"prompt": prompt, "chosen": answer, "rejected": pairs[rejected][1], "score": len(answer.split())})
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def _question_answers() -> Iterable[tuple[str, str]]:
    for file in _corpus_files():
        for conversation in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            question, answer, *_ = [*map(_clean, conversation), ""]
            if question and answer:
                yield question, answer


def _clean(turn: Any) -> str:
    """A turn on one line."""
    return " ".join(str(turn).split())


def _corpus_files() -> list[Path]:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the demo data needs the package chatterbot-corpus, which is not installed: run `make demo`, run "
            "`pip install chatterbot-corpus`, or set --data.sources"
        )
    return sorted((Path(spec.submodule_search_locations[0]) / "data" / "english").glob("*.yml"))
