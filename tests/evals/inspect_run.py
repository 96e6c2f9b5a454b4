"""A task of Inspect on a server, and on Inspect's own Hugging Face provider.

python tests/evals/inspect_run.py URL NAME FOLDER      # in the environment of install.sh
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

TOKENS = 16


def task() -> Task:
    """Questions whose answers must contain a word."""
    rows = [json.loads(line) for line in Path(__file__).with_name("tasks").joinpath("answers.jsonl").open()]
    questions = [row["question"].split("\n")[0].removeprefix("Question: ") for row in rows]
    samples = [Sample(question, target=row["answer"]) for question, row in zip(questions, rows, strict=True)]
    return Task(dataset=samples, solver=generate(), scorer=includes(), name="plain")


def evaluated(model: Model) -> dict[str, Any]:
    """The accuracy and the answers."""
    with tempfile.TemporaryDirectory() as folder:
        (log,) = inspect_ai.eval(task(), model=model, log_dir=folder, display="none")
        assert log.status == "success", log.error
        assert log.results is not None and log.samples is not None
        samples = sorted(log.samples, key=lambda sample: int(sample.id))  # read from the folder
    answers = [sample.output.completion.strip() for sample in samples]
    return {"accuracy": log.results.scores[0].metrics["accuracy"].value, "answers": answers}


def main() -> None:
    """Evaluate both, and print JSON."""
    url, name, folder = sys.argv[1:]
    greedy = GenerateConfig(temperature=0.0, max_tokens=TOKENS, max_connections=8)
    served = get_model(
        f"openai-api/served/{name}", base_url=f"{url}/v1", api_key=os.environ["OPENAI_API_KEY"], config=greedy
    )
    own = get_model(
        "hf/local",
        model_path=folder,
        tokenizer_path=folder,
        device="cpu",
        do_sample=False,
        dtype="float32",
        config=GenerateConfig(max_tokens=TOKENS, max_connections=1),
    )
    print(json.dumps({"served": evaluated(served), "own": evaluated(own)}))


if __name__ == "__main__":
    main()
