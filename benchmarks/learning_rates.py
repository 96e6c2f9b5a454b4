"""Learning rates against the width of the model: each step at multiples of the rate that `optimizer.lr: null` derives.

    python -m benchmarks.learning_rates                                              # about an hour on one core
    python -m benchmarks.learning_rates --widths 576 --steps ppo --updates 48 --rollout 16 --multiples 1
    python -m benchmarks.learning_rates --widths 64 --steps ppo grpo --updates 600 --multiples 1       # a long run
    python -m benchmarks.learning_rates --widths 64 --steps sft --lora_alpha 16

The models of widths 64 and 256 are Llamas that first learn conversations of the demo; that of 576 is
SmolLM2-135M-Instruct. The reward of RL is five times the share of an answer's words whose first letter is in the first
half of the alphabet: a smooth function with the standard deviation of a usual reward model, about 1. The pairs of the
reward model and of DPO are answers and the same answers with shuffled words. The multiple `flat` is the rate of a model
of 7B at every width. Prints a line a run and appends it to rates.csv in benchmarks/results/learning.zip, or in --out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from benchmarks import results
from benchmarks.learning_tasks import write_rows
from benchmarks.words import TEMPLATE
from hybrid_rlhf import RL, SFT, PreferenceTuning, RewardModel
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.data.rows.embedded import write_demo_data
from hybrid_rlhf.engines.learning_rates import RATES, Learning, derived_rate
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.world import solo_world

StepName = Literal["ppo", "grpo", "sft", "reward", "preference"]
LEARNING: dict[StepName, Learning] = {
    "ppo": "actor",
    "grpo": "actor",
    "sft": "sft",
    "reward": "reward",
    "preference": "preference",
}
EMBEDDED_WIDTH = 576
LAYERS = {64: 3, 256: 5}
PRETRAINING_RATES = {64: 4e-3, 256: 1e-3}
QUESTION_WORDS, ANSWER_WORDS = 12, 16
UPDATES_OF_A_ROLLOUT = 4


@dataclass(frozen=True)
class RateRun:
    """One run of a step."""

    step: StepName
    width: int
    multiple: str
    seed: int
    updates: int
    rollout: int
    """Completions of a rollout."""
    lora: LoraConfig | None

    def rate(self, learning: Learning) -> float:
        """The learning rate."""
        if self.multiple == "flat":
            return RATES[learning]
        return float(self.multiple) * derived_rate(learning, width=self.width, lora=self.lora)[0]

    @property
    def adapters(self) -> dict[str, Any]:
        """The section `lora`, if there are adapters."""
        return {} if self.lora is None else {"lora": {"rank": self.lora.rank, "alpha": self.lora.alpha}}


def early_letters(completions: Sequence[str], **columns: Any) -> list[float]:
    """Five times the share of the words that begin with a letter before n."""
    shares = []
    for text in completions:
        words = text.split()
        shares.append(5.0 * sum("a" <= word[0].lower() < "n" for word in words) / max(len(words), 1))
    return shares


def write_data(folder: Path) -> None:
    """Rows for pretraining, SFT, pairs and prompts, from the conversations of the demo."""
    rows = [json.loads(line) for line in write_demo_data(folder / "demo", seed=0).read_text("utf-8").splitlines()]
    chance = random.Random(0)
    chance.shuffle(rows)
    rows = [row for row in rows if len(row["prompt"][-1]["content"].split()) <= QUESTION_WORDS]
    plain: list[dict[str, Any]] = [
        {"prompt": row["prompt"][-1:], "completion": " ".join(row["chosen"].split()[:ANSWER_WORDS])} for row in rows
    ]
    write_rows(folder / "pretraining.jsonl", plain[: len(plain) // 2])
    write_rows(folder / "sft.jsonl", plain[len(plain) // 2 :])
    write_rows(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in plain])
    pairs = []
    for row in plain:
        words = row["completion"].split()
        worse = chance.sample(words, len(words))
        if worse != words:
            pairs.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": " ".join(worse)})
    write_rows(folder / "pairs.jsonl", pairs)


def write_model(folder: Path, width: int) -> Path:
    """A model of a width, with a short chat template."""
    path = folder / f"model_{width}"
    if width == EMBEDDED_WIDTH:
        source = resolve_model("embedded", world=solo_world(torch.device("cpu")))
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(path)
        return path
    write_random_model(folder / f"random_{width}", width, folder / "pretraining.jsonl")
    SFT(
        model=folder / f"random_{width}",
        data=data_of(folder, "pretraining", max_length=64),
        optimizer={"lr": PRETRAINING_RATES[width]},
        train={"global_batch_size": 16, "epochs": 20},
        logging={"sinks": []},
        output_dir=str(path),
    ).train()
    return path


def write_random_model(path: Path, width: int, texts: Path) -> None:
    """A Llama of random weights, and a tokenizer of 1024 tokens."""
    rows = [json.loads(line) for line in texts.read_text("utf-8").splitlines()]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [" ".join((row["prompt"][0]["content"], row["completion"])) for row in rows],
        vocab_size=1024,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|im_end|>", pad_token="<pad>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=LAYERS[width],
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    for part in (model, tokenizer):
        part.save_pretrained(path)


def data_of(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    """The section `data` of a step."""
    return {
        "sources": [str(folder / f"{name}.jsonl")],
        "eval_fraction": 0.15,
        "cache_dir": str(folder / "cache"),
        **keys,
    }


def train(run: RateRun, folder: Path, output: Path) -> list[dict[str, Any]]:
    """Do a run; its metrics."""
    common: dict[str, Any] = {
        "model": folder / f"model_{run.width}",
        "output_dir": str(output),
        "seed": run.seed,
        "logging": {"sinks": []},
    }
    optimizer = {"lr": run.rate(LEARNING[run.step])}
    if run.step in ("ppo", "grpo"):
        group = 4 if run.step == "grpo" else 1
        RL(
            **common,
            algorithm={"name": run.step},
            reward=[{"name": "early", "function": f"{__spec__.name}:early_letters"}],
            data=data_of(folder, "prompts", max_eval_rows=64),
            actor={"optimizer": optimizer, **run.adapters},
            **({"critic": {"optimizer": {"lr": run.rate("critic")}}} if run.step == "ppo" else {}),
            rollout={
                "prompts_per_step": run.rollout // group,
                "max_prompt_tokens": 64,
                "sampling": {"max_new_tokens": 16, "n": group},
            },
            train={"max_steps": run.updates // UPDATES_OF_A_ROLLOUT, "epochs": 1000},
        ).train()
    else:
        kind: Any = {"sft": SFT, "reward": RewardModel, "preference": PreferenceTuning}[run.step]
        kind(
            **common,
            **run.adapters,
            data=data_of(folder, "sft" if run.step == "sft" else "pairs", max_length=64),
            optimizer=optimizer,
            train={"global_batch_size": 8, "max_steps": run.updates, "epochs": 1000},
        ).train()
    return read_metrics(output)


def figures(step: StepName, lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The held-out figure before and after; of RL also the KL of the last five rollouts, the highest KL, and the
    explained variance of the last ten."""
    name = {"sft": "eval/loss", "ppo": "eval/scores", "grpo": "eval/scores"}.get(step, "eval/accuracy")
    held_out = [line[name] for line in lines if name in line]
    kl = [line["objective/kl"] for line in lines if "objective/kl" in line]
    explained = [line["val/explained_variance"] for line in lines if "val/explained_variance" in line]
    return {
        "before": held_out[0],
        "after": held_out[-1],
        "kl": statistics.fmean(kl[-5:]) if kl else "",
        "highest_kl": max(kl) if kl else "",
        "explained": statistics.fmean(explained[-10:]) if explained else "",
    }


def main() -> None:
    """Run, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", choices=(*LAYERS, EMBEDDED_WIDTH), default=list(LAYERS))
    parser.add_argument("--steps", nargs="+", choices=LEARNING, default=list(LEARNING))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--multiples", nargs="+", default=["flat", "1", "4", "16"], help="of the derived rate, or flat")
    parser.add_argument("--updates", type=int, help="none: 240 of RL, four a rollout; 100 of the other steps")
    parser.add_argument("--rollout", type=int, default=64, help="completions of a rollout")
    parser.add_argument("--lora_alpha", type=float, help="adapters of rank 16; none: all weights learn")
    parser.add_argument("--out", type=Path, default=results.RESULTS, help="folder of learning.zip")
    options = parser.parse_args()
    lora = None if options.lora_alpha is None else LoraConfig(rank=16, alpha=options.lora_alpha)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for width in options.widths:
            write_model(folder, width)
        runs = [
            RateRun(
                step,
                width,
                multiple,
                seed,
                options.updates or (240 if step in ("ppo", "grpo") else 100),
                options.rollout,
                lora,
            )
            for width in options.widths
            for step in options.steps
            for multiple in options.multiples
            for seed in options.seeds
        ]
        for number, run in enumerate(runs):
            start = time.perf_counter()
            lines = train(run, folder, folder / f"run_{number}")
            append(options.out, run, figures(run.step, lines), seconds=time.perf_counter() - start)


def append(folder: Path, run: RateRun, found: Mapping[str, Any], *, seconds: float) -> None:
    """A line of the output and a row of the CSV."""
    row = {
        "step": run.step,
        "width": run.width,
        "lora": "" if run.lora is None else run.lora.alpha,
        "multiple": run.multiple,
        "lr": run.rate(LEARNING[run.step]),
        "seed": run.seed,
        "updates": run.updates,
        **found,
    }
    shown = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
    print(*(f"{name} {value}" for name, value in shown.items()), f"{seconds:.0f} s", flush=True)
    rows = [*results.read_csv("learning", "rates.csv", folder), shown]
    results.write_csv("learning", "rates.csv", rows, folder)


if __name__ == "__main__":
    main()
