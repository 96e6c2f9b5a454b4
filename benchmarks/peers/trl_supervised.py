"""A supervised trainer of TRL, which tells of each update; runs in an environment of its own.

    pip install torch trl==1.16.0
    ENV/bin/python benchmarks/peers/trl_supervised.py --task dpo --model DIR --rows FILE --progress FILE --steps 20

The rows are JSON lines of token ids, in the order of training: `input_ids` and `completion_mask` for sft, `prompt_ids`,
`chosen_ids` and `rejected_ids` for reward and dpo. Settings are TRL's own, but that activations are kept (faster) and
nothing is saved. The loss of each update goes to --progress as it ends, a line each; the last line printed is JSON, the
versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


class Progress(TrainerCallback):  # type: ignore[misc]
    """A line an update: its loss."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Figures of an update, after all of it."""
        if logs and "loss" in logs:
            with self._file.open("a") as out:
                out.write(f"{logs['loss']!r}\n")


def main() -> None:
    """Train, print the versions."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [json.loads(line) for line in Path(options.rows).read_text().splitlines()]
    if options.task == "reward":
        rows = [{side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")} for row in rows]
    trainer_class, config_class, architecture = TASKS[options.task]
    kind = in_order(trainer_class)
    extra = {"num_labels": 1} if architecture is AutoModelForSequenceClassification else {}
    trainer = kind(
        model=architecture.from_pretrained(options.model, dtype=torch.float32, **extra),
        args=config_class(
            output_dir=tempfile.mkdtemp(),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            max_length=options.max_length,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            seed=0,
            save_strategy="no",
            gradient_checkpointing=False,
            weight_decay=0.0,
            **({"completion_only_loss": True} if options.task == "sft" else {}),
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(options.model),
        callbacks=[Progress(options.progress)],
    )
    trainer.train()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    print(json.dumps(versions))


TASKS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig, AutoModelForCausalLM),
    "reward": (RewardTrainer, RewardConfig, AutoModelForSequenceClassification),
    "dpo": (DPOTrainer, DPOConfig, AutoModelForCausalLM),
}


def in_order(trainer: type) -> type:
    """The trainer, taking rows of token ids as they come, one after the other."""

    class InOrder(trainer):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset: Any, *arguments: Any, **named: Any) -> Any:
            return super()._prepare_dataset(dataset, *arguments, **named) if trainer is SFTTrainer else dataset

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)

    return InOrder


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=sorted(TASKS))
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--rows", required=True, help="JSON lines of token ids")
    parser.add_argument("--progress", required=True, help="file that a line an update is added to")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
