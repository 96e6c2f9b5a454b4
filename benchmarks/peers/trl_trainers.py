"""A trainer of TRL, which tells of each step; runs in an environment of its own.

    pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
    ENV/bin/python benchmarks/peers/trl_trainers.py --task dpo --model DIR --rows FILE --progress FILE --steps 20

The rows are JSON lines of token ids, in the order of training: `input_ids` and `completion_mask` for sft, `prompt_ids`,
`chosen_ids` and `rejected_ids` for reward and dpo; for grpo they have messages, `prompt`. Settings are TRL's own, but
that activations are kept (faster) and nothing is saved; grpo also has the KL coefficient and the --updates of a rollout
that this project has by default. The figures of each step go to --progress as it ends, a line of JSON each; the last
line printed is JSON, the versions.
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
from letters import letters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)


class Progress(TrainerCallback):  # type: ignore[misc]
    """A line a step: its figures."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        """Figures of a step, after all of it."""
        if logs and "loss" in logs:
            with self._file.open("a") as out:
                out.write(json.dumps(logs) + "\n")


def main() -> None:
    """Train, print the versions."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [json.loads(line) for line in Path(options.rows).read_text().splitlines()]
    if options.task == "reward":
        rows = [{side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")} for row in rows]
    trainer_class, config_class, architecture = TASKS[options.task]
    kind = trainer_class if options.task == "grpo" else in_order(trainer_class)
    extra = {"num_labels": 1} if architecture is AutoModelForSequenceClassification else {}
    trainer = kind(
        model=architecture.from_pretrained(options.model, dtype=torch.float32, **extra),
        args=config_class(
            output_dir=tempfile.mkdtemp(),
            max_steps=options.steps * options.updates,
            per_device_train_batch_size=options.batch,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            logging_steps=options.updates,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            seed=0,
            save_strategy="no",
            gradient_checkpointing=False,
            weight_decay=0.0,
            **own_settings(options),
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(options.model),
        callbacks=[Progress(options.progress)],
        **({"reward_funcs": letters} if options.task == "grpo" else {}),
    )
    trainer.train()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    print(json.dumps(versions))


def own_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings that not all trainers have."""
    if options.task == "grpo":
        return {
            "num_generations": options.completions,
            "max_completion_length": options.max_length,
            "steps_per_generation": options.updates,
            "gradient_accumulation_steps": 1,
            "loss_type": "grpo",
            "beta": 0.04,
        }
    return {"max_length": options.max_length, **({"completion_only_loss": True} if options.task == "sft" else {})}


TASKS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig, AutoModelForCausalLM),
    "reward": (RewardTrainer, RewardConfig, AutoModelForSequenceClassification),
    "dpo": (DPOTrainer, DPOConfig, AutoModelForCausalLM),
    "grpo": (GRPOTrainer, GRPOConfig, AutoModelForCausalLM),
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
    parser.add_argument("--max_length", type=int, default=128, help="of a row; grpo: of a completion")
    parser.add_argument("--updates", type=int, default=1, help="of a step")
    parser.add_argument("--completions", type=int, default=8, help="of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
