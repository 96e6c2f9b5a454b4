"""SFT, reward training and DPO side by side: this project's commands, TRL's trainers, and the matrix products.

    python -m benchmarks.supervised_step                                # this project and the limit
    python -m benchmarks.supervised_step --trl_python ENV/bin/python    # TRL 1.16 too, see peers/trl_trainers.py

SmolLM2-135M in float32 on the CPU, all of it trained, updates of 8 rows or pairs. Lengths are even from --shortest to
--longest tokens, by default so that about half of a padded batch is real; a quarter of each is the prompt. Both sides
make the same updates: the same token ids in the same order, the same start (the scorer's head too), AdamW at a constant
rate. This project, TRL and the limit take turns, an update each, while the others' processes rest. The first updates
warm up; medians over the others are printed, of real tokens a second and of the ratios of updates, and the largest
difference of the two losses over all updates. A step's seconds are those of the whole loop. HYBRID_RLHF_PRODUCTS
chooses this project's products (`runtime/product_backend.py`).

The reference of DPO is read live on both sides, which is TRL's default. Where this project reads it once (its default)
a step costs a third less, and the pass before training as much as the first epoch saves.

The limit counts matrix products of linear layers on real tokens, forward and backward (two for each forward), the head
on the answers' tokens only; for DPO a forward more, the reference's: as torch computes them, and in the faster of
torch's and oneDNN's form (benchmarks/matrix_products.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from benchmarks.in_turn import ROOT, InTurn, add_shared_options, environment, words, write_result
from benchmarks.learning_tasks import write_rows
from benchmarks.matrix_products import Products, Times
from benchmarks.words import PAD_TOKEN, plain_words
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.data.tokenized import TokenizedData, load_preference_data, load_sft_data
from hybrid_rlhf.models.pretrained.sources import quiet_transformers, resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.host_memory import MALLOC_ENVIRONMENT
from hybrid_rlhf.runtime.world import solo_world

LEARNING_RATE = 1e-5
OURS, TRL = "this project", "TRL"
TORCH_PRODUCTS, FASTEST_PRODUCTS = "matrix products, torch's", "matrix products, fastest"
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
    "dpo": Task(
        "training/preference/main.py",
        PreferenceStepConfig,
        "lm",
        load_preference_data,
        {"algorithm": "dpo", "reference": {"logprobs": "live"}},
    ),
}


@dataclass
class Side:
    """What one side measured, a figure an update."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_gib: float | None = None


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
            batches = peer_rows(task, folder, tokenizer, options)
            sides, versions = measure(task, batches, folder, options)
            results[task] = report(task, batches, sides, options)
    write_result(options, versions, tasks=results)


def prepare(folder: Path, options: argparse.Namespace) -> PreTrainedTokenizerBase:
    """Folders lm and scorer, and rows of text for each task."""
    path = resolve_model("embedded", world=solo_world(torch.device("cpu")))
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
        return int(torch.randint(options.shortest, options.longest + 1, (), generator=generator))

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
        "output_dir": str(output),
        "seed": options.seed,
        "model": {"path": str(folder / TASKS[task].model), "dtype": "float32"},
        "data": {
            "sources": [str(source)],
            "eval_fraction": 0.0,
            "cache_dir": str(folder / "cache"),
            "max_length": 2 * options.longest,
        },
        "optimizer": {
            "lr": LEARNING_RATE,
            "schedule": "constant",
            "warmup_fraction": 0.0,
            "weight_decay": 0.0,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "max_grad_norm": 1.0,
        },
        "train": {"max_steps": options.steps, "global_batch_size": options.batch},
        "logging": {"sinks": []},
        **TASKS[task].own,
    }
    file = output.with_suffix(".yaml")
    file.write_text(json.dumps(config))  # JSON is YAML
    return file


def peer_rows(
    task: str, folder: Path, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> list[list[dict[str, Any]]]:
    """The updates that this project will make, as rows of token ids; written for TRL, one after the other."""
    config = parse_config(TASKS[task].config, ["--config", str(config_of(task, folder / task, folder, options))])
    world = solo_world(torch.device("cpu"))
    data = TASKS[task].load(config.data, tokenizer=tokenizer, seed=config.seed, world=world)
    loader = BatchLoader(
        data.train,
        global_batch_size=options.batch,
        world_rank=0,
        world_size=1,
        micro_batches=config.train.micro_batches("cpu"),
        seed=config.seed,
    )
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


def measure(
    task: str, batches: Sequence[Sequence[dict[str, Any]]], folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Side], dict[str, str]]:
    """All sides, an update each in turn; the versions of TRL and what it ran on."""
    products = products_of(task, folder, batches)
    metrics, progress = folder / task / "metrics.jsonl", folder / f"{task}_trl.txt"
    loss = f"{'preference' if task == 'dpo' else task}/loss"
    config = config_of(task, metrics.parent, folder, options)
    plain = environment(options.threads)
    runs: dict[str, InTurn] = {}
    limits: list[Times] = []
    try:
        line = [sys.executable, str(ROOT / TASKS[task].main), "--config", str(config)]
        runs[OURS] = InTurn(
            line,
            log=folder / f"{task}.log",
            progress=metrics,
            mark=f'"{loss}"',
            environment={**plain, **MALLOC_ENVIRONMENT},  # as train.py starts its steps
        )
        if options.trl_python:
            line = peer_line(task, progress, folder, options)
            runs[TRL] = InTurn(line, log=folder / f"{task}_trl.log", progress=progress, mark="\n", environment=plain)
        for batch in batches:
            for run in runs.values():
                run.update()
            limits.append(products(batch))
        told = {name: run.finish() for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()
    losses = {OURS: [row[loss] for row in map(json.loads, metrics.read_text().splitlines()) if loss in row]}
    if TRL in runs:
        losses[TRL] = [json.loads(line)["loss"] for line in progress.read_text().splitlines()]
    sides = {
        TORCH_PRODUCTS: Side([limit.torch for limit in limits]),
        FASTEST_PRODUCTS: Side([limit.fastest for limit in limits]),
        **{name: Side(run.seconds, losses[name], run.peak_gib) for name, run in runs.items()},
    }
    return sides, json.loads(told[TRL]) if TRL in told else {}


def products_of(
    task: str, folder: Path, batches: Sequence[Sequence[dict[str, Any]]]
) -> Callable[[Sequence[dict[str, Any]]], Times]:
    """A function of a batch that computes the products of its update."""
    sizes = [sizes_of(batch) for batch in batches]
    with quiet_transformers():
        lm = AutoModelForCausalLM.from_pretrained(folder / "lm", dtype=torch.float32)
    most = max(sizes)
    products = Products(lm, most[0], outputs=max(answers for _, answers in sizes))

    @torch.inference_mode()
    def of(batch: Sequence[dict[str, Any]]) -> Times:
        tokens, answers = sizes_of(batch)
        size = (tokens, 0 if task == "reward" else answers)
        return products.times(forward=[size, size] if task == "dpo" else [size], backward=[size])

    return of


def peer_line(task: str, progress: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    """TRL on the same rows."""
    settings = {
        "task": task,
        "model": folder / TASKS[task].model,
        "rows": folder / f"{task}_ids.jsonl",
        "lr": LEARNING_RATE,
        "progress": progress,
        "steps": options.steps,
        "batch": options.batch,
        "max_length": 2 * options.longest,
        "threads": options.threads,
    }
    return [options.trl_python, str(ROOT / "benchmarks/peers/trl_trainers.py"), *words(settings)]


def report(
    task: str, batches: Sequence[Sequence[dict[str, Any]]], sides: dict[str, Side], options: argparse.Namespace
) -> dict[str, Any]:
    """A table on the screen, and what goes into the JSON."""
    tokens = [float(sizes_of(batch)[0]) for batch in batches]
    print(
        f"\n{task}: {options.steps} updates of {options.batch} rows, {statistics.mean(tokens):.0f} real tokens each; "
        f"medians of {options.steps - options.warmup}, {options.threads} threads"
    )
    measured = {name: side.seconds[options.warmup :] for name, side in sides.items()}
    ratios = {}
    for name, seconds in measured.items():
        speed = statistics.median(t / s for t, s in zip(tokens[options.warmup :], seconds, strict=True))
        peak = sides[name].peak_gib
        ratios[name] = statistics.median(s / own for s, own in zip(seconds, measured[OURS], strict=True))
        print(
            f"{name:24s} {speed:7.1f} real tokens/s  {statistics.median(seconds):6.2f} s an update "
            f"({min(seconds):.2f} to {max(seconds):.2f}), {ratios[name]:.2f} of this project's"
            f"{'' if peak is None else f'  peak {peak:.2f} GiB'}"
        )
    told: dict[str, Any] = {"seconds_over_ours": ratios, "tokens": tokens}
    if TRL in sides:
        ours, trl = sides[OURS], sides[TRL]
        assert ours.peak_gib and trl.peak_gib, "both were looked at"
        told["memory_over_trl"] = ours.peak_gib / trl.peak_gib
        told["largest_loss_difference"] = max(abs(a - b) for a, b in zip(ours.losses, trl.losses, strict=True))
        print(
            f"{told['memory_over_trl']:.2f} x TRL's memory; losses, {ours.losses[0]:.4f} to {ours.losses[-1]:.4f}, "
            f"differ by at most {told['largest_loss_difference']:.1e}"
        )
    return told | {"sides": {name: asdict(side) for name, side in sides.items()}}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--batch", type=int, default=8, help="rows or pairs of an update")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of a sequence, about: words are whole")
    parser.add_argument("--longest", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="updates that are not measured")
    add_shared_options(parser, trl="1.16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
