"""PPO of TRL 0.24, the last with a PPOTrainer, timed an update at a time; runs in an environment of its own.

    pip install torch trl==0.24.0 transformers==4.57.6 'datasets<5' accelerate
    ENV/bin/python benchmarks/peers/trl_ppo.py --actor DIR --reward DIR --prompts FILE --steps 2

The prompts are JSON lines with `input_ids`, all of one length. The last line printed is JSON: of each measured update
its seconds, real tokens (prompt and response up to and with the stop token), mean length and the share of responses
that never stopped; and the peak of resident memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
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
from trl import PPOConfig, PPOTrainer
from trl.trainer import ppo_trainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """When training began and each update ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End of an update."""
        self.times.append(time.perf_counter())


class Lengths:
    """Listens where TRL cuts responses at the stop token; asked once a batch of rollouts."""

    def __init__(self) -> None:
        self._truncate = ppo_trainer.truncate_response
        self.lengths: list[int] = []
        self.unfinished: list[bool] = []
        ppo_trainer.truncate_response = self

    def __call__(self, stop_token_id: int, pad_token_id: int, responses: torch.Tensor) -> torch.Tensor:
        """TRL's own cut, and note of the lengths."""
        for row in (responses == stop_token_id).tolist():
            stopped = True in row
            self.lengths.append(row.index(True) + 1 if stopped else len(row))
            self.unfinished.append(not stopped)
        return self._truncate(stop_token_id, pad_token_id, responses)


def main() -> None:
    """Train, print one line."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    lines = Path(options.prompts).read_text().splitlines()
    prompts = datasets.Dataset.from_list([{"input_ids": json.loads(line)["input_ids"]} for line in lines])
    clock, lengths = Clock(), Lengths()
    trainer = PPOTrainer(
        args=arguments(options),
        processing_class=tokenizer(Path(options.actor)),
        model=AutoModelForCausalLM.from_pretrained(options.actor, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(options.actor, dtype=torch.float32),
        reward_model=scorer(options.reward),
        value_model=scorer(options.reward),
        train_dataset=prompts,
        eval_dataset=prompts,
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps(result(options, clock, lengths, prompt_tokens=len(prompts[0]["input_ids"]))))


def arguments(options: argparse.Namespace) -> PPOConfig:
    """One epoch, one mini-batch and one micro-batch a rollout; nothing evaluated, nothing saved."""
    return PPOConfig(
        output_dir=tempfile.mkdtemp(),
        total_episodes=options.prompts_per_step * (options.warmup + options.steps),
        per_device_train_batch_size=options.prompts_per_step,
        gradient_accumulation_steps=1,
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=options.prompts_per_step,
        response_length=options.new_tokens,
        temperature=1.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        kl_coef=0.05,
        stop_token="eos",
        missing_eos_penalty=None,
        num_sample_generations=0,
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=options.seed,
        save_strategy="no",
        gradient_checkpointing=False,
    )


def scorer(folder: str) -> Any:
    """A model with one score a token."""
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """From its file: the class that a newer transformers names in the folder is not known here."""
    names = json.loads((folder / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=names["eos_token"],
        pad_token=names["pad_token"],
        padding_side="left",
    )


def result(options: argparse.Namespace, clock: Clock, lengths: Lengths, *, prompt_tokens: int) -> dict[str, Any]:
    """The figures of the measured updates."""
    rows, total = options.prompts_per_step, options.warmup + options.steps
    assert len(clock.times) == total + 1, f"{len(clock.times) - 1} updates for {total}"
    assert len(lengths.lengths) == rows * total, f"{len(lengths.lengths)} responses for {rows * total}"
    updates = range(options.warmup, total)
    generated = [sum(lengths.lengths[rows * i : rows * (i + 1)]) for i in updates]
    return {
        "seconds": [clock.times[i + 1] - clock.times[i] for i in updates],
        "tokens": [rows * prompt_tokens + tokens for tokens in generated],
        "mean_length": [tokens / rows for tokens in generated],
        "unfinished": [sum(lengths.unfinished[rows * i : rows * (i + 1)]) / rows for i in updates],
        "peak_gib": peak_gib(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
    }


def peak_gib() -> float:
    """The most memory that was resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actor", required=True, help="folder of actor and reference")
    parser.add_argument("--reward", required=True, help="folder of reward model and critic")
    parser.add_argument("--prompts", required=True, help="JSON lines with input_ids")
    parser.add_argument("--prompts_per_step", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=1, help="updates that are not measured")
    parser.add_argument("--steps", type=int, default=2, help="updates that are")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
