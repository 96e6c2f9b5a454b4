"""The tasks of this folder by lm-evaluation-harness, on a server and on the harness' own Hugging Face backend.

    python tests/evals/harness.py URL NAME FOLDER      # in the environment of install.sh, in the root of the checkout

Prints the metrics of both, and the answers to each request: texts or log-likelihoods.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ["plain_choices", "plain_answers", "plain_texts"]


def evaluated(backend: str, **arguments: Any) -> dict[str, Any]:
    """Metrics, and what the model answers to each request."""
    manager = TaskManager(include_path=str(Path(__file__).with_name("tasks")), include_defaults=False)
    settings = {"max_length": 1024, **arguments}
    run = lm_eval.simple_evaluate(
        backend, model_args=settings, tasks=list(TASKS), task_manager=manager, batch_size=1, bootstrap_iters=0
    )
    rows = {task: sorted(run["samples"][task], key=lambda row: row["doc_id"]) for task in TASKS}
    answers = {task: [row["resps"] for row in rows[task]] for task in TASKS}
    return {"metrics": {task: run["results"][task] for task in TASKS}, "answers": answers}


def main() -> None:
    """Evaluate both, and print JSON."""
    url, name, folder = sys.argv[1:]
    served = evaluated(
        "local-completions",
        model=name,
        base_url=f"{url}/v1/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        num_concurrent=8,
        max_retries=1,
    )
    own = evaluated("hf", pretrained=folder, dtype="float32", device="cpu")
    print(json.dumps({"served": served, "own": own}, default=str))


if __name__ == "__main__":
    main()
