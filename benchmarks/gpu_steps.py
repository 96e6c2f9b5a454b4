"""Parts of `benchmarks.gpu_hour` on whole steps: generation beside its peers, and three steps of GRPO and PPO.

A step runs as users start it (`hybrid_rlhf.cli.rl`), on a random model; the memory at each switch to generation
and back is noted, and what `hybrid-rlhf plan` estimates of the same config.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.generation import SHAPES
from benchmarks.gpu_record import DEVICE, ON_GPU, Record, limits
from benchmarks.head_dtype import SIZES, HeadSizes, measured
from tests.support.tiny import tiny_tokenizer

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
MODEL = "qwen2.5-0.5b"
GIB = 2**30
GENERATION = {
    "0.5B, ragged": "qwen2.5-0.5b ragged 256 256 512 3 generate",
    "0.5B, 256 rows": "qwen2.5-0.5b uniform 256 256 512 3 generate",
    "0.5B, 1024 rows": "qwen2.5-0.5b uniform 1024 256 256 2",
    "7B, 64 rows": "qwen2.5-7b uniform 64 256 256 2 generate",
    "7B, 256 rows": "qwen2.5-7b uniform 256 256 256 2",
}
"""Model, scenario, requests, tokens of prompts and new ones, runs, and peers of `benchmarks.generation`."""
SMALL_GENERATION = {"small, 4 rows": "small uniform 4 8 4 1 generate"}
_OPTIONS = ("--model", "--scenario", "--requests", "--prompt_tokens", "--new_tokens", "--runs")
VARIANTS: dict[str, list[str]] = {
    "grpo": ["--algorithm", "grpo"],
    "ppo": ["--algorithm", "ppo"],
    "deterministic": ["--algorithm", "grpo", "--deterministic", "true"],
    "async": [
        "--algorithm",
        "grpo",
        "--rollout.async_sampling.policy_lag",
        "1",
        "--algorithm.correction.method",
        "truncate",
        "--rollout.kv_cache_gib",
        "8" if ON_GPU else "0.1",
    ],
    "offload": [
        "--algorithm",
        "grpo",
        "--rollout.offload_states",
        "true",
        "--rollout.offload_frozen",
        "true",
        "--model.gradient_checkpointing",
        "true",
        "--model.activation_offload",
        "true",
    ],
    "lora": ["--algorithm", "grpo", "--actor.lora.rank", "16"],
}
"""Words of step 3 for each part."""


def generation(record: Record, *, small: bool) -> None:
    """`benchmarks.generation` at the shapes of real models, each in a process of its own."""
    record.measure("limits", lambda: limits(small=small))
    vllm = os.environ.get("GPU_HOUR_VLLM_PYTHON")
    for name, words in (SMALL_GENERATION if small else GENERATION).items():
        record.measure(name, lambda w=words: _generation(w.split(), ["--vllm_python", vllm] if vllm else []))


def _generation(settings: list[str], more: list[str]) -> dict[str, Any]:
    words = [word for pair in zip(_OPTIONS, settings, strict=False) for word in pair]
    words += ["--peers", *settings[len(_OPTIONS) :], *more]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.generation", *words, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        result = json.loads(file.read_text())
    speeds = {
        name: result["useful_tokens"] / sorted(times)[len(times) // 2] for name, times in result["seconds"].items()
    }
    return {"useful_tokens_per_second": speeds, "share_of_products": speeds["this engine"] / speeds["matrix products"]}


def head_dtype(record: Record, *, small: bool) -> None:
    """`benchmarks.head_dtype` on random weights in bfloat16, with 151,936 words."""
    sizes, runs = (HeadSizes(2, 16, 4), 1) if small else (SIZES, 7)
    record.measure(
        "head_dtype float32 against model",
        lambda: measured(_random_model(torch.bfloat16, small=small).to(DEVICE), sizes, runs=runs),  # type: ignore[arg-type]
    )


def _random_model(dtype: torch.dtype, *, small: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        **(TINY if small else SHAPES[MODEL]),
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def steps(record: Record, part: str, *, small: bool) -> None:
    """Three steps of an algorithm."""
    record.measure(part, lambda: _three_steps(VARIANTS[part], small=small))


def _three_steps(words: list[str], *, small: bool) -> dict[str, Any]:
    from hybrid_rlhf.cli.rl import main
    from hybrid_rlhf.configs.rl import RLConfig
    from hybrid_rlhf.planning.phase_memory import GPU_RESERVE_GIB, Device
    from hybrid_rlhf.planning.step_memory import Planner
    from hybrid_rlhf.runtime.command_line import parse_config
    from hybrid_rlhf.runtime.observability.metrics import read_metrics

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = _line(folder, small=small) + words
        total = torch.cuda.get_device_properties(0).total_memory if ON_GPU else 16 * GIB
        machine = Device(DEVICE, 1, total - GPU_RESERVE_GIB * GIB)
        plan = {phase.name: phase.total / GIB for phase in Planner(machine).phases(parse_config(RLConfig, line))}
        with _watched() as syncs:
            try:
                main(line)
            except SystemExit as stop:
                if stop.code:
                    raise RuntimeError(f"the step ended with {stop.code}: see its lines above") from stop
        told = [line for line in read_metrics(folder / "run") if "time/step_seconds" in line]
    keys = ("time/", "memory/", "rollout/logprob_abs_diff_mean", "rollout/tokens_per_second", "kl")
    return {
        "plan_gib": plan,
        "weight_syncs_gib": syncs,
        "steps": [{key: value for key, value in line.items() if key.startswith(keys)} for line in told],
    }


def _line(folder: Path, *, small: bool) -> list[str]:
    """A random model, prompts, and the words that both algorithms share."""
    _random_model(torch.bfloat16 if ON_GPU else torch.float32, small=small).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    prompts, prompt, new = (2, 40, 8) if small else (64, 256, 256)
    rows = ({"prompt": f"{i}: " + "say it again, " * (prompt // 28)} for i in range(6 * prompts))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--model.path",
        str(folder / "model"),
        "--data.sources",
        str(folder / "rows.jsonl"),
        "--data.cache_dir",
        str(folder / "cache"),
        "--output_dir",
        str(folder / "run"),
        "--logging.sinks",
        "[]",
        "--reward.components",
        json.dumps([{"function": f"{__file__}:favours_short"}]),
        "--train.max_steps",
        "3",
        "--rollout.prompts_per_step",
        str(prompts),
        "--rollout.sampling.n",
        "4" if small else "8",
        "--rollout.max_prompt_tokens",
        str(prompt * 2),
        "--rollout.sampling.max_new_tokens",
        str(new),
    ]


def favours_short(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward."""
    return [-float(len(text)) for text in completions]


@contextlib.contextmanager
def _watched() -> Iterator[list[dict[str, float]]]:
    """Memory before, inside and after each weight sync."""
    from hybrid_rlhf.engines.hybrid import HybridEngine

    syncs: list[dict[str, float]] = []
    own = HybridEngine.inference

    def now(name: str) -> dict[str, float]:
        if not ON_GPU:
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            f"{name}: allocated": torch.cuda.memory_allocated() / GIB,
            f"{name}: reserved": torch.cuda.memory_reserved() / GIB,
            f"{name}: used": (total - free) / GIB,
        }

    @contextlib.contextmanager
    def watched(self: HybridEngine, **options: Any) -> Iterator[Any]:
        found = now("before")
        with own(self, **options) as engine:
            found |= now("entered")
            yield engine
            found |= now("generated")
        syncs.append({**found, **now("left"), "weight_sync_seconds": self.weight_sync_seconds})

    HybridEngine.inference = watched  # type: ignore[method-assign]
    try:
        yield syncs
    finally:
        HybridEngine.inference = own  # type: ignore[method-assign]
