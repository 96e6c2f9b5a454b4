"""Run folders like those of a small project, for the page of the board and its pictures; all numbers are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid_rlhf.runtime.files.names import FINISHED_FILE
from tests.support.board import append_rows, write_run

MARKUP = "<img src=x onerror=\"document.title='executed'\"><script>document.title='executed'</script>"
"""A completion that must be shown, not executed."""
STEPS = 60
RECORDED = (1, 20, 40, 60)
_PROMPTS = 6
_PER_GROUP = 4


def write_showcase(folder: Path) -> Path:
    """Three seeds of a GRPO run, a PPO run, and one that ended before its first step."""
    tokenizer = _tokenizer()
    for seed in (1, 2, 3):
        run = write_run(folder / f"gsm-grpo-seed{seed}", seed=seed, **_settings("grpo", STEPS))
        _write_metrics(run, np.random.default_rng(seed), final=0.86)
        _write_samples(run, tokenizer, seed)
        (run / FINISHED_FILE).write_text("{}")
    run = write_run(folder / "gsm-ppo", seed=1, **_settings("ppo", 200))
    _write_metrics(run, np.random.default_rng(9), final=0.71, longer=260)
    _write_samples(run, tokenizer, 9)
    write_run(folder / "gsm-ppo-lr1e-3", seed=1, **_settings("ppo", 200))
    return folder


def _settings(algorithm: str, steps: int) -> dict[str, Any]:
    return {
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "algorithm": {"name": algorithm},
        "train": {"max_steps": steps},
        "logging": {"samples_every": 20},
    }


def _write_metrics(run: Path, random: np.random.Generator, *, final: float, longer: float = 46) -> None:
    lines = []
    for step in range(1, STEPS + 1):
        part = 1 - np.exp(-3.0 * step / STEPS)
        noise = random.normal(0, 0.025, 8)
        generation, training = 4.1 + 1.5 * part + abs(noise[0]) * 8, 3.2 + abs(noise[1]) * 5
        scoring, sync = 0.7 + abs(noise[2]), 0.35 + abs(noise[3])
        seconds = {"generation": generation, "training": training, "scoring": scoring, "weight_sync": sync}
        values = {
            "objective/scores": 0.22 + (final - 0.22) * part + noise[4],
            "objective/scores_std": 0.4 - 0.15 * part + noise[5] / 2,
            "objective/kl": 0.9 * part**2 + abs(noise[6]),
            "objective/entropy": 62 * np.exp(-0.7 * part) + 40 * noise[7],
            "completions/mean_length": 118 + longer * part + 90 * noise[0],
            "completions/clipped_ratio": max(0.0, 0.16 - 0.12 * part + noise[1] / 3),
            "reward/correct/mean": 0.2 + (final - 0.2) * part + noise[4],
            "reward/format/mean": 0.9 - longer / 500 * part + noise[5] / 3,
            "policy/approxkl": 0.004 + abs(noise[2]) / 20,
            "policy/clipfrac": 0.05 + abs(noise[3]),
            "perf/tokens_per_second": 2900 + 9000 * noise[4],
            **{f"time/{name}_seconds": taken for name, taken in seconds.items()},
            "time/step_seconds": sum(seconds.values()),
            "memory/peak_gib": 11.2 + abs(noise[5]),
        }
        rounded = {name: round(float(value), 5) for name, value in values.items()}
        lines.append(json.dumps({"step": step, "time_seconds": round(9.1 * step, 2), **rounded}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def _question(prompt: int) -> tuple[str, int]:
    first, second = 12 + 7 * prompt, 5 + 3 * prompt
    names = ("Ada", "Emil", "Noor", "Ivo", "Lena", "Kai")
    text = f"{names[prompt % 6]} has {first} stamps and buys {second} packs of 4. How many stamps are there then?"
    return text, first + 4 * second


def _completion(prompt: int, number: int, right: bool) -> str:
    _, total = _question(prompt)
    first, packs = 12 + 7 * prompt, 5 + 3 * prompt
    if number == 3 and prompt == 5:
        return f"The answer is {total}. {MARKUP}"
    start = ("Packs first", "Let me count", "Step by step", "We add what was bought")[number % 4]
    found = total if right else total - 4
    return (
        f"{start}: {packs} packs of 4 are {packs} × 4 = {4 * packs} stamps.\n"
        f"With the {first} from before that makes {first} + {4 * packs} = {found}.\n\nThe answer is {found}."
    )


def _tokenizer() -> Tokenizer:
    """Byte pairs of these very texts, so that each becomes some dozens of tokens."""
    texts = [
        _completion(prompt, number, right) for prompt in range(6) for number in range(4) for right in (True, False)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *(_question(prompt)[0] for prompt in range(6))], trainer)
    return tokenizer


def _write_samples(run: Path, tokenizer: Tokenizer, seed: int) -> None:
    (run / "actor").mkdir()
    tokenizer.save(str(run / "actor" / "tokenizer.json"))
    (run / "tokens").mkdir()
    for step in RECORDED:
        random = np.random.default_rng([seed, step])
        rows = [_row(step, index, random) for index in range(_PROMPTS * _PER_GROUP)]
        append_rows(run, rows)
        save_file(_record(rows, tokenizer, random), run / "tokens" / f"step_{step:08}.safetensors")


def _row(step: int, index: int, random: np.random.Generator) -> dict[str, Any]:
    prompt, number = divmod(index, _PER_GROUP)
    right = bool(random.random() < 0.3 + 0.6 * step / STEPS)
    completion = _completion(prompt, number, right)
    parts = {"correct": float(right), "format": round(float(random.uniform(0.6, 1)), 3), "length_penalty": -0.05}
    return {
        "step": step,
        "prompt": [
            {"role": "system", "content": 'Solve the problem. End with "The answer is N."'},
            {"role": "user", "content": _question(prompt)[0]},
        ],
        "completion": completion,
        "score": round(sum(parts.values()), 4),
        "kl": round(float(random.gamma(2.0, 0.2)), 4),
        "weight_versions": [[step - 1, len(completion) // 4]],
        "index": index,
        "group": prompt,
        "prompt_row": prompt,
        "length": len(completion) // 4,
        "stopped": bool(random.random() > 0.1),
        "components": parts,
        "advantage": round(float(random.normal()), 4),
    }


def _record(rows: list[dict[str, Any]], tokenizer: Tokenizer, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays of a token record; see token_records.py."""
    prompts = [tokenizer.encode("\n".join(turn["content"] for turn in row["prompt"]) + "\n").ids for row in rows]
    completions = [tokenizer.encode(row["completion"]).ids for row in rows]
    lengths = np.array([len(ids) for ids in completions])
    count = int(lengths.sum())
    logprobs = -random.gamma(0.5, 0.6, count)
    walk = np.concatenate([np.cumsum(random.normal(0, 0.35, length)) for length in lengths])
    columns = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + random.normal(0, 0.01, count),
        "ref_logprobs": logprobs + random.normal(0, 0.25, count),
        "advantages": walk,
        "entropy": random.gamma(1.2, 0.5, count),
        "rewards": np.where(random.random(count) < 0.05, walk, 0.0),
    }
    ids = [np.array(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]
    masks = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(ids, prompts, strict=True)]
    return {
        "offsets": np.cumsum([0, *map(len, ids)]).astype(np.int64),
        "response_offsets": np.cumsum([0, *lengths]).astype(np.int64),
        "prompt_lengths": np.array([len(prompt) for prompt in prompts], np.int64),
        "ids": np.concatenate(ids).astype(np.int32),
        "response": np.concatenate(masks),
        **{f"columns.{name}": values.astype(np.float32) for name, values in columns.items()},
    }
