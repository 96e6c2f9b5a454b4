"""The tasks of the learning benchmark: a model, prompts, a reward and the config of a PPO run, each in a folder.

`copy` needs nothing but this repository: a Llama of 0.1M random weights sees four letters and is rewarded by the share
of its eight tokens that repeat the first of them. The best score is 1; a random policy has about 0.1.
`prefix` is the same with answers that are right or wrong, by their first one to eight tokens: mixed difficulty.
`demo` is SmolLM2-135M on the demo's learned reward; it takes the folders that `make demo` leaves.
`reasoning` is SmolLM2-135M on family relations of reasoning-gym (extra `bench`): right answers to fresh questions.
`sharp` is SmolLM2-135M, with the library's defaults, against a reward model whose scores are large and which prefers
long answers: does the critic explain anything, and do answers still end?
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.words import TEMPLATE
from hybrid_rlhf.data.rows.embedded import write_demo_data
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.runtime.world import solo_world

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "hybrid_rlhf" / "configs" / "commands" / "demo.yaml"
LETTERS = "abcdefgh"
COPY_TOKENS = 8
PREFIX_START = 24
"""Steps of the copy task from which `prefix` starts."""
REASONING_TASK = "family_relationships"
REASONING_LORA = {"rank": 16, "alpha": 32}


@dataclass(frozen=True)
class Task:
    """A PPO run to be repeated over seeds."""

    config: dict[str, Any]
    """Of training/step3_ppo/main.py, but for seed and output_dir."""
    optimum: float | None
    """Best possible mean score, where it is known."""
    metric: str = "objective/scores"
    held_out: tuple[str, ...] = ()
    """Metrics of held-out prompts, compared before and after; the first is the score."""
    also: tuple[str, ...] = ()
    """Other metrics of rollouts whose curves are kept."""
    end_points: int = 10
    """Number of last points of a curve whose mean is its end."""
    is_accuracy: bool = False
    """Whether the held-out score is a share of right answers."""


def copied(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward of `copy`: the share of the tokens that are the prompt's first letter."""
    wanted = [prompt[-1]["content"].split()[0] for prompt in prompts]
    return [text.split().count(letter) / COPY_TOKENS for letter, text in zip(wanted, completions, strict=True)]


def begun(prompts: Sequence[Any], completions: Sequence[str], tokens: Sequence[int], **columns: Any) -> list[float]:
    """Reward of `prefix`: 1 if the first `tokens` tokens are all the prompt's first letter, else 0."""
    wanted = [prompt[-1]["content"].split()[0] for prompt in prompts]
    return [
        float(text.split()[:count] == [letter] * count)
        for letter, text, count in zip(wanted, completions, tokens, strict=True)
    ]


def checked(prompts: Sequence[Any], completions: Sequence[str], entry: Sequence[str], **columns: Any) -> list[float]:
    """Reward of `reasoning`: 1 where reasoning-gym's own checker takes the whole answer, else 0."""
    import reasoning_gym

    checker = reasoning_gym.get_score_answer_fn(REASONING_TASK)
    items = map(json.loads, entry)
    return [float(checker(text.strip(), item) == 1.0) for text, item in zip(completions, items, strict=True)]


def copy_task(folder: Path, *, steps: int, std: float = 0.02) -> Task:
    """Write model, tokenizer and prompts; `std`: of the initial weights."""
    write_small_model(folder / "model", std=std)
    chance = random.Random(0)
    rows = [{"prompt": " ".join(chance.choices(LETTERS, k=4))} for _ in range(4096)]
    write_rows(folder / "prompts.jsonl", rows)
    config = {
        "model": {"path": str(folder / "model")},
        "actor": {"optimizer": _optimizer(7e-4)},
        "critic": {"optimizer": _optimizer(2e-3)},
        "reward": {"components": [{"function": "benchmarks.learning_tasks:copied"}]},
        "data": {"sources": [str(folder / "prompts.jsonl")], "eval_fraction": 0.03, "cache_dir": str(folder / "cache")},
        "rollout": {"prompts_per_step": 128, "max_prompt_tokens": 16, "sampling": {"max_new_tokens": COPY_TOKENS}},
        # All answers are as long as may be: none is punished for it.
        "algorithm": {"name": "ppo", "kl": None, "epochs": 4, "mini_batches": 2, "penalties": None},
        "train": {"max_steps": steps, "epochs": 100},
    }
    return Task(config, optimum=1.0)


def prefix_task(folder: Path, *, steps: int) -> Task:
    """Write the copy task with 256 prompts whose answers are right or wrong, for GRPO, whose groups of equal scores
    teach nothing. The model has begun to learn the copy task, and answers the prompts of one token often, those of
    eight hardly ever."""
    copy = copy_task(folder, steps=steps).config
    grpo = {
        "rollout": {**copy["rollout"], "prompts_per_step": 16},
        "algorithm": {**copy["algorithm"], "name": "grpo"},
    }
    first = {**copy, **grpo, "train": {"max_steps": PREFIX_START, "epochs": 100}, "output_dir": str(folder / "first")}
    del first["critic"]
    run_step(["training/step3_ppo/main.py"], first, folder / "first.yaml")
    chance = random.Random(1)
    for name, count in (("prompts", 256), ("held_out", 64)):
        rows = [
            {"prompt": " ".join(chance.choices(LETTERS, k=4)), "tokens": row % COPY_TOKENS + 1} for row in range(count)
        ]
        write_rows(folder / f"{name}.jsonl", rows)
    config = {
        **copy,
        **grpo,
        "model": {"path": str(folder / "first" / "actor")},
        "reward": {"components": [{"function": "benchmarks.learning_tasks:begun"}]},
        "data": {**copy["data"], "eval_sources": [str(folder / "held_out.jsonl")]},
        "train": {**copy["train"], "eval_every": 5},
    }
    return Task(config, optimum=1.0, metric="eval/scores", end_points=1)


def write_small_model(folder: Path, *, std: float = 0.02) -> None:
    """A Llama of 0.1M random weights, and a tokenizer of the letters, each one token."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", ">", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
            tie_word_embeddings=False,
            initializer_range=std,
        )
    )
    for part in (model, tokenizer):
        part.save_pretrained(folder)


def demo_task(folder: Path, *, steps: int, kl_coef: float | None = None) -> Task:
    """The demo's SFT model against the demo's reward model; `folder` is what `make demo` wrote. None: its own KL."""
    for step in ("step1_sft", "step2_reward"):
        if not (folder / step / "config.json").is_file():
            raise SystemExit(
                f"{folder}/{step} holds no model: run `make demo` first, and give --demo its output folder"
            )
    demo = yaml.safe_load(DEMO.read_text())
    config = demo["rl"]
    config["model"] = {"path": str(folder / "step1_sft")}
    config["reward"] = {"components": [str(folder / "step2_reward")]}
    config["data"] |= {"sources": [str(folder / "demo_data" / "pairs.jsonl")], "split": demo["data"]["split"]}
    if kl_coef is not None:
        config["algorithm"]["kl"] = {"coef": kl_coef}
    config["train"] |= {"max_steps": steps, "epochs": 100}
    return Task(config, optimum=None, held_out=("eval/scores", "eval/kl"))


def reasoning_task(folder: Path, *, steps: int) -> Task:
    """SmolLM2-135M says how two of a family of three are related; actor and critic are adapters on one base.

    That an answer is one word it has from 64 instances of step 1, none of them seen again.
    """
    path = resolve_model("embedded", world=solo_world(torch.device("cpu")))
    shutil.copytree(path, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    rows = _family_rows(size=64 + 2048, seed=0)  # what is held out is fresh
    shown, fresh = rows[:64], rows[64:]
    write_rows(folder / "first.jsonl", shown)
    write_rows(folder / "prompts.jsonl", fresh)
    _learn_answers(folder, model="model", rows="first.jsonl", output="sft")
    config = {
        "model": {"path": str(folder / "sft")},
        "actor": {"lora": REASONING_LORA, "optimizer": _optimizer(5e-4)},
        "critic": {"share_base": True, "optimizer": _optimizer(1e-3)},
        "reward": {"components": [{"function": "benchmarks.learning_tasks:checked"}]},
        "data": {
            "sources": [str(folder / "prompts.jsonl")],
            "eval_fraction": 144 / len(fresh),
            "max_eval_rows": 144,
            "cache_dir": str(folder / "cache"),
        },
        "rollout": {"prompts_per_step": 48, "max_prompt_tokens": 64, "sampling": {"max_new_tokens": 4}},
        "algorithm": {"name": "ppo", "kl": {"coef": 0.005}, "epochs": 1, "mini_batches": 2, "penalties": None},
        "train": {"max_steps": steps, "epochs": 100},
    }
    return Task(config, optimum=None, held_out=("eval/scores", "eval/kl"), is_accuracy=True)


def reasoning_teacher(folder: Path) -> Path:
    """The task's model after SFT on 512 questions that no run sees."""
    lines = [line for name in ("first", "prompts") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    seen = {json.loads(line)["prompt"] for line in lines}
    # question n of seed s is question n + 1 of seed s - 1
    rows = [row for row in _family_rows(size=1024, seed=2**20) if row["prompt"] not in seen]
    write_rows(folder / "more.jsonl", rows[:512])
    _learn_answers(folder, model="sft", rows="more.jsonl", output="teacher")
    return folder / "teacher"


def _family_rows(*, size: int, seed: int) -> list[dict[str, str]]:
    """Different questions of the reasoning task, with what its checker needs."""
    import reasoning_gym

    instances = reasoning_gym.create_dataset(REASONING_TASK, size=size, seed=seed, min_family_size=3, max_family_size=3)
    return [
        {"prompt": text, "entry": json.dumps(item, default=str), "completion": item["answer"]}
        for text, item in {item["question"]: item for item in instances}.items()
    ]


def _learn_answers(folder: Path, *, model: str, rows: str, output: str) -> None:
    """SFT in a task's folder."""
    first = {
        "output_dir": str(folder / output),
        "model": {"path": str(folder / model)},
        "lora": REASONING_LORA,
        "optimizer": {"lr": 1e-3},
        "data": {"sources": [str(folder / rows)], "eval_fraction": 0.0},
        "train": {"global_batch_size": 16},
        "logging": {"sinks": []},
    }
    run_step(["training/step1_sft/main.py"], first, folder / f"{output}.yaml")


def sharp_task(folder: Path, *, steps: int) -> Task:
    """PPO with defaults against a sharp reward model that prefers long answers.

    An answer is the corpus's own, followed by up to three of other questions; of a pair the worse one is shorter, and
    its words are shuffled.
    """
    path = resolve_model("embedded", world=solo_world(torch.device("cpu")))
    file = write_demo_data(folder / "corpus", seed=0)
    corpus = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    corpus = [row for row in corpus if len(row["chosen"].split()) <= 24 and len(row["prompt"][-1]["content"]) <= 120]
    chance = random.Random(0)
    chance.shuffle(corpus)

    def answer(first: str, count: int) -> str:
        return " ".join([first, *(row["chosen"] for row in chance.sample(corpus, count - 1))])

    def shuffled(text: str) -> str:
        words = text.split()
        return " ".join(chance.sample(words, len(words)))

    def pair(row: dict[str, Any]) -> dict[str, Any]:
        worse = shuffled(answer(row["chosen"], chance.randint(1, 2)))
        return {"prompt": row["prompt"], "chosen": answer(row["chosen"], chance.randint(2, 4)), "rejected": worse}

    shown, judged, asked = corpus[:200], corpus[200:500], corpus[500:]
    write_rows(
        folder / "sft.jsonl",
        [{"prompt": row["prompt"], "completion": answer(row["chosen"], chance.randint(1, 4))} for row in shown],
    )
    write_rows(folder / "pairs.jsonl", [pair(row) for row in judged])
    write_rows(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in asked])
    adapters = {"rank": 16, "alpha": 32}
    for entry, name, section in (
        ("step1_sft", "sft", {"model": {"path": path}, "optimizer": {"lr": 1e-3}}),
        ("step2_reward", "pairs", {"model": {"path": str(folder / "step1_sft")}, "optimizer": {"lr": 1e-3}}),
    ):
        config = {
            **section,
            "output_dir": str(folder / entry),
            "lora": adapters,
            "logging": {"sinks": []},
            "data": {"sources": [str(folder / f"{name}.jsonl")], "max_length": 160, "eval_fraction": 0.2},
            "train": {"global_batch_size": 8},
        }
        run_step([f"training/{entry}/main.py"], config, folder / f"{entry}.yaml")
    config = {
        "model": {"path": str(folder / "step1_sft")},
        "actor": {"optimizer": {"lr": 1e-5}},
        "reward": {"components": [str(folder / "step2_reward")]},
        "data": {"sources": [str(folder / "prompts.jsonl")], "eval_fraction": 0.15, "cache_dir": str(folder / "cache")},
        "rollout": {"prompts_per_step": 32, "max_prompt_tokens": 64, "sampling": {"max_new_tokens": 64}},
        "train": {"max_steps": steps, "epochs": 100},
    }
    held_out = ("eval/scores", "eval/kl", "eval/clipped_ratio", "eval/mean_length")
    return Task(config, optimum=None, held_out=held_out, also=("val/explained_variance", "completions/clipped_ratio"))


def run_step(entry: Sequence[str], config: Mapping[str, Any], file: Path, *, threads: int | None = None) -> None:
    """A step in a process of its own; its config is written to the file. Ends with what the step said if it fails."""
    file.write_text(yaml.safe_dump(dict(config)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    line = [sys.executable, *entry, "--config", str(file)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a run ended with {done.returncode}: {done.stderr[-2000:]}")


def _optimizer(lr: float) -> dict[str, Any]:
    return {"lr": lr, "schedule": "linear", "warmup_fraction": 0.0}


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
