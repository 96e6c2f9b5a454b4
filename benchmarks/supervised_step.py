"""SFT, reward training and DPO side by side: this project's commands, TRL's trainers, and the matrix products.

    python -m benchmarks.supervised_step                                # this project and the limit
    python -m benchmarks.supervised_step --trl_python ENV/bin/python    # TRL 1.16 too, see peers/trl_supervised.py

SmolLM2-135M in float32 on the CPU, all of it trained, updates of 8 rows or pairs. Lengths are even from 16 tokens to
--longest, so that about half of a padded batch is real; a quarter of each is the prompt. Both sides make the same
updates: the same token ids in the same order, the same start (the scorer's head too), AdamW at a constant rate. Rounds
run limit, this project, TRL in turn; the first updates of a process warm up; medians over the others are printed, in
real tokens a second, and the largest difference of the two losses over all updates. A step's seconds are those of the
whole loop.

The reference of DPO is read live on both sides, which is TRL's default. Where this project reads it once (its default)
a step costs a third less, and the pass before training as much as the first epoch saves.

The limit counts matrix products of linear layers on real tokens, forward and backward (two for each forward), the head
on the answers' tokens only; for DPO a forward more, the reference's. See benchmarks/ppo_step.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from benchmarks.learning_tasks import write_rows
from benchmarks.ppo_step import CPU, PAD_TOKEN, ROOT, Products, peak_of, peer_result, plain_words
from hybrid_rlhf.configs.cli import parse_config
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.data.tokenized import TokenizedData, load_preference_data, load_sft_data
from hybrid_rlhf.models.sources import quiet_transformers, resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import solo_world

LEARNING_RATE = 1e-5
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Ends with the answer's last token, which both sides learn."""


@dataclass(frozen=True)
class Task:
    """A step of this project and what TRL has for it."""

    main: str
    config: Any
    model: str
    load: Callable[..., TokenizedData]
    own: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "sft": Task("training/step1_sft/main.py", SFTConfig, "lm", load_sft_data),
    "reward": Task("training/step2_reward/main.py", RewardConfig, "scorer", load_preference_data),
    "dpo": Task("training/preference/main.py", PreferenceStepConfig, "lm", load_preference_data,
                {"algorithm": "dpo", "reference": {"logprobs": "live"}}),
}  # fmt: skip


@dataclass
class Side:
    """What one side measured: a figure an update; peaks a figure a round."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of the first round."""
    peak_gib: list[float] = field(default_factory=list)


def main() -> None:
    """Make the folders, measure all sides in turn, print a table, write JSON."""
    options = parse()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = prepare(folder, options)
        for task in options.tasks:
            limit, ours, trl = Side(), Side(), Side()
            batches = peer_rows(task, folder, tokenizer, options)
            for number in range(options.rounds):
                measure_limit(limit, task, folder, batches)
                measure_ours(ours, task, folder / f"{task}_{number}", folder, options)
                if options.trl_python:
                    versions = measure_trl(trl, task, folder, options)
            results[task] = report(task, batches, limit, ours, trl, options)
    if options.json:
        told = {"options": vars(options), "platform": platform.platform(), "torch": torch.__version__,
                "transformers": transformers.__version__, "trl_versions": versions, "tasks": results}  # fmt: skip
        Path(options.json).write_text(json.dumps(told, indent=1) + "\n")


def prepare(folder: Path, options: argparse.Namespace) -> PreTrainedTokenizerBase:
    """Folders lm and scorer, and rows of text for each task."""
    path = resolve_model("embedded", world=solo_world(CPU))
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = PAD_TOKEN  # transformers' scorer looks for the last token that is not this one
    with quiet_transformers():
        lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        lm.config.pad_token_id = tokenizer.pad_token_id
        lm.save_pretrained(folder / "lm")
        scorer = AutoModelForSequenceClassification.from_pretrained(folder / "lm", num_labels=1, dtype=torch.float32)
        with torch.no_grad():
            scorer.score.weight.normal_(std=0.01, generator=torch.Generator().manual_seed(1))
        scorer.save_pretrained(folder / "scorer")
    for name in ("lm", "scorer"):
        tokenizer.save_pretrained(folder / name)
    write_texts(folder, tokenizer, options)
    return tokenizer


def write_texts(folder: Path, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
    """Conversations and pairs of random words whose tokens are even in number from 16 to the longest."""
    words = plain_words(tokenizer)
    generator = torch.Generator().manual_seed(options.seed)
    template = 12  # tokens of an empty turn of each

    def text(tokens: int) -> str:
        places = torch.randint(len(words), (max(1, tokens),), generator=generator).tolist()
        return " ".join(words[place] for place in places)

    def length() -> int:
        return int(torch.randint(16, options.longest + 1, (), generator=generator))

    rows, pairs = [], []
    for _ in range(options.batch * options.steps):
        first, second = length(), length()
        asked = first // 4
        rows.append({"prompt": text(asked), "completion": text(first - asked - template)})
        chosen, rejected = text(first - asked - template), text(max(1, second - asked - template))
        pairs.append({"prompt": text(asked), "chosen": chosen, "rejected": rejected})
    for name, lines in (("sft", rows), ("pairs", pairs)):
        write_rows(folder / f"{name}.jsonl", lines)


def config_of(task: str, output: Path, folder: Path, options: argparse.Namespace) -> Path:
    """The file that the step is started with."""
    source = folder / ("sft.jsonl" if task == "sft" else "pairs.jsonl")
    config = {
        "output_dir": str(output), "seed": options.seed,
        "model": {"path": str(folder / TASKS[task].model), "dtype": "float32"},
        "data": {"sources": [str(source)], "eval_fraction": 0.0, "cache_dir": str(folder / "cache"),
                 "max_length": 2 * options.longest},
        "optimizer": {"lr": LEARNING_RATE, "schedule": "constant", "warmup_fraction": 0.0, "weight_decay": 0.0,
                      "betas": [0.9, 0.999], "eps": 1e-8, "max_grad_norm": 1.0},
        "train": {"max_steps": options.steps, "global_batch_size": options.batch},
        "logging": {"tensorboard": False}, **TASKS[task].own,
    }  # fmt: skip
    file = output.with_suffix(".yaml")
    file.write_text(json.dumps(config))  # JSON is YAML
    return file


def peer_rows(
    task: str, folder: Path, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> list[list[dict[str, Any]]]:
    """The updates that this project will make, as rows of token ids; written for TRL, one after the other."""
    config = parse_config(TASKS[task].config, ["--config", str(config_of(task, folder / task, folder, options))])
    world = solo_world(CPU)
    data = TASKS[task].load(config.data, tokenizer=tokenizer, seed=config.seed, world=world)
    loader = BatchLoader(
        data.train, global_batch_size=options.batch, world_rank=0, world_size=1,
        micro_batches=config.train.micro_batches, seed=config.seed,
    )  # fmt: skip
    batches = [[peer_row(row) for micro in batch for row in micro if row is not None] for batch in loader.iterate(1)]
    assert len(batches) == options.steps, f"{len(batches)} updates of {options.steps}"
    lines = [json.dumps(row) for batch in batches for row in batch]
    (folder / f"{task}_ids.jsonl").write_text("\n".join(lines) + "\n")
    return batches


def peer_row(row: dict[str, Any]) -> dict[str, Any]:
    """Columns as TRL has them."""
    if "input_ids" in row:
        return {"input_ids": row["input_ids"], "completion_mask": [int(own) for own in row["loss_mask"]]}
    ((better, worse),) = row["pairs"]
    chosen, rejected = row["responses"][better], row["responses"][worse]
    prompt = row["masks"][better].index(True)
    assert all(row["masks"][better][prompt:]) and chosen[:prompt] == rejected[:prompt], "an answer to the end"
    return {"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:], "rejected_ids": rejected[prompt:]}


def sizes_of(batch: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Real tokens, and those of answers."""
    if "input_ids" in batch[0]:
        return sum(len(row["input_ids"]) for row in batch), sum(sum(row["completion_mask"]) for row in batch)
    answers = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in batch)
    return answers + 2 * sum(len(row["prompt_ids"]) for row in batch), answers


@torch.inference_mode()
def measure_limit(side: Side, task: str, folder: Path, batches: Sequence[Sequence[dict[str, Any]]]) -> None:
    """The products of each update."""
    sizes = [sizes_of(batch) for batch in batches]
    with quiet_transformers():
        lm = AutoModelForCausalLM.from_pretrained(folder / "lm", dtype=torch.float32)
    most = max(sizes)
    products = Products(lm, most[0], outputs=max(answers for _, answers in sizes))
    products.forward([most])  # warms up
    for tokens, answers in sizes:
        size = (tokens, 0 if task == "reward" else answers)
        forwards = [size, size] if task == "dpo" else [size]
        side.seconds.append(products.forward(forwards) + products.backward([size]))


def measure_ours(side: Side, task: str, output: Path, folder: Path, options: argparse.Namespace) -> None:
    """The step as a user runs it, in a process of its own; figures are read from its metrics."""
    metrics = output / "metrics.jsonl"

    def told() -> list[dict[str, float]]:
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    command = [sys.executable, str(ROOT / TASKS[task].main), "--config", str(config_of(task, output, folder, options))]
    side.peak_gib.append(
        peak_of(command, output.with_suffix(".log"), options, until=lambda: len(told()) > options.steps)
    )
    name = f"{'preference' if task == 'dpo' else task}/loss"
    lines = [line for line in told() if name in line]
    assert [line["step"] for line in lines] == list(range(1, options.steps + 1)), "a line a step"
    times = [line["time_seconds"] for line in lines]
    side.seconds += [after - before for before, after in zip(times, times[1:], strict=False)][options.warmup - 1 :]
    side.losses = side.losses or [line[name] for line in lines]


def measure_trl(side: Side, task: str, folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """TRL on the same rows, in its own environment; the versions of what ran."""
    command = [
        options.trl_python, str(ROOT / "benchmarks/peers/trl_supervised.py"), "--task", task, "--model",
        str(folder / TASKS[task].model), "--rows", str(folder / f"{task}_ids.jsonl"), "--lr", str(LEARNING_RATE),
        "--steps", str(options.steps), "--batch", str(options.batch), "--max_length", str(2 * options.longest),
        "--threads", str(options.threads),
    ]  # fmt: skip
    result = peer_result(command, folder, options)
    side.seconds += result["seconds"][options.warmup :]
    side.losses = side.losses or result["losses"][: options.steps]
    side.peak_gib.append(result["peak_gib"])
    return dict(result["versions"])


def report(
    task: str, batches: Sequence[Sequence[dict[str, Any]]], limit: Side, ours: Side, trl: Side,
    options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """A table on the screen, and what goes into the JSON."""
    tokens = [float(sizes_of(batch)[0]) for batch in batches]
    speeds = {}
    print(f"\n{task}: {options.steps} updates of {options.batch} rows, {statistics.mean(tokens):.0f} real tokens each; "
          f"median of {len(ours.seconds)} in {options.rounds} processes, {options.threads} threads")  # fmt: skip
    for name, side, of in (
        ("matrix products", limit, tokens), ("this project", ours, tokens[options.warmup :]),
        ("TRL", trl, tokens[options.warmup :]),
    ):  # fmt: skip
        if not side.seconds:
            continue
        each = of * options.rounds
        speeds[name] = statistics.median(t / s for t, s in zip(each, side.seconds, strict=True))
        peak = f"  peak {statistics.median(side.peak_gib):.2f} GiB" if side.peak_gib else ""
        print(f"{name:16s} {speeds[name]:7.1f} real tokens/s  {statistics.median(side.seconds):6.2f} s an update "
              f"({min(side.seconds):.2f} to {max(side.seconds):.2f}){peak}")  # fmt: skip
    told = {"share_of_products": speeds["this project"] / speeds["matrix products"]}
    print(f"this project is at {told['share_of_products']:.0%} of the products")
    if trl.seconds:
        told["over_trl"] = speeds["this project"] / speeds["TRL"]
        told["memory_over_trl"] = statistics.median(ours.peak_gib) / statistics.median(trl.peak_gib)
        told["largest_loss_difference"] = max(abs(a - b) for a, b in zip(ours.losses, trl.losses, strict=True))
        print(f"it is {told['over_trl']:.2f} x as fast as TRL, in {told['memory_over_trl']:.2f} x its memory; losses, "
              f"{ours.losses[0]:.4f} to {ours.losses[-1]:.4f}, differ by at most "
              f"{told['largest_loss_difference']:.1e}")  # fmt: skip
    return {
        **told,
        "tokens": tokens,
        "speeds": speeds,
        "limit": asdict(limit),
        "ours": asdict(ours),
        "trl": asdict(trl),
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--batch", type=int, default=8, help="rows or pairs of an update")
    parser.add_argument("--longest", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="updates of each process that are not measured")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl_python", help="python of an environment with TRL 1.16")
    parser.add_argument("--json", help="file for the raw figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
