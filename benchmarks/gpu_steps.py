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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.generation import SHAPES, make_work, ours
from benchmarks.gpu_record import DEVICE, ON_GPU, Record, limits, seconds, synchronize
from benchmarks.head_dtype import SIZES, HeadSizes, measured
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.functional import logprobs
from hybrid_rlhf.functional.logprobs import logprobs_from_hidden
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.models.policy import HEAD_CHUNK_TOKENS, Policy
from hybrid_rlhf.models.pretrained.loading import adapt_model
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import solo_world
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
_STEPS = 3
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
    "operations": ["--algorithm", "grpo"],
    "ppo": ["--algorithm", "ppo"],
    "deterministic": ["--algorithm", "grpo", "--deterministic", "true"],
    "lag": [
        "--algorithm",
        "grpo",
        "--rollout.max_lag",
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
    "nf4": ["--algorithm", "grpo", "--actor.lora.rank", "16", "--model.quantization", "nf4"],
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


def head(record: Record, *, small: bool) -> None:
    """Log-probs by kernels and by torch's operations, and `benchmarks.head_dtype` in bfloat16; 151,936 words."""
    for hidden in (64,) if small else (896, 3584):
        for by_kernels in (True, False) if ON_GPU else (False,):
            name = f"hidden size {hidden}, by {'kernels' if by_kernels else 'operations'}"
            record.measure(name, lambda h=hidden, k=by_kernels: _head_seconds(h, by_kernels=k, small=small))
    sizes, runs = (HeadSizes(2, 16, 4), 1) if small else (SIZES, 7)
    record.measure(
        "head_dtype float32 against model",
        lambda: measured(_random_model(torch.bfloat16, small=small), sizes, runs=runs),
    )


def _head_seconds(hidden: int, *, by_kernels: bool, small: bool) -> dict[str, float]:
    """Milliseconds of 8,192 tokens without and with the backward pass."""
    tokens, vocabulary, dtype = (64, 512, torch.float32) if small else (8192, 151_936, torch.bfloat16)
    states = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, hidden, device=DEVICE, dtype=dtype)).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_from_hidden(states, weight=weight, labels=labels, chunk_tokens=HEAD_CHUNK_TOKENS)

    def both() -> None:
        torch.autograd.grad(torch.stack(forward()).sum(), (states, weight))

    with mock.patch.object(logprobs, "_suits_kernels", lambda hidden: by_kernels):
        return {"forward_ms": 1e3 * seconds(forward, runs=5), "forward_backward_ms": 1e3 * seconds(both, runs=5)}


def _random_model(dtype: torch.dtype, *, small: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        **(TINY if small else SHAPES[MODEL]),
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device(DEVICE):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def passes(record: Record, *, small: bool) -> None:
    """Training passes over rows of 400 tokens by size of the micro-batch; then the same with compiled layers."""
    model = _random_model(torch.bfloat16 if ON_GPU else torch.float32, small=small)
    adapt_model(model, ModelConfig())
    policy = Policy(model)
    sizes = (800,) if small else (8192, 16_384, 32_768, 65_536)
    for name in ("eager", "compiled") if ON_GPU else ("eager",):
        if name == "compiled":
            for layer in model.model.layers:
                layer.compile(dynamic=True)
        for tokens in sizes if name == "eager" else sizes[:-1]:
            record.measure(f"{name}, {tokens} tokens", lambda t=tokens: _pass_figures(policy, t))


def _pass_figures(policy: Policy, tokens: int) -> dict[str, float]:
    ids = torch.randint(3, 500, (tokens // 400, 400), device=DEVICE)
    real = torch.ones_like(ids)

    def forward() -> None:
        with torch.no_grad():
            policy(ids, real, real)

    def both() -> None:
        torch.stack(policy(ids, real, real)).sum().backward()

    figures: dict[str, float] = {}
    for name, run in (("forward", forward), ("forward_backward", both)):
        figures[f"{name}_tokens_per_second"] = ids.numel() / seconds(run, runs=4)
        synchronize()
        start = time.perf_counter()
        run()
        figures[f"{name}_launch_seconds"] = time.perf_counter() - start
        synchronize()
    if ON_GPU:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
    return figures


def profile(record: Record, *, small: bool) -> None:
    """Device time by kernel of 32 decoding steps of 256 rows. Steps have those of their phases."""
    record.measure("decoding", lambda: _profiled_decoding(small=small))


def _profiled_decoding(*, small: bool) -> dict[str, Any]:
    model = _random_model(torch.bfloat16 if ON_GPU else torch.float32, small=small)
    decoder = decoder_of(model, world=solo_world(DEVICE), dtype=model.dtype)
    requests, prompt = (4, 8) if small else (256, 256)
    run = ours(
        decoder,
        make_work(
            "uniform",
            requests=requests,
            prompt_tokens=prompt,
            new_tokens=33,
            n=1,
            vocabulary=model.config.vocab_size,
        ),
    )
    run()
    with _profiled() as told:
        run()
    return told


@contextlib.contextmanager
def _profiled() -> Iterator[dict[str, Any]]:
    """Seconds of what runs inside and of its kernels, and the 20 kernels that take most: seconds and calls."""
    activities = [torch.profiler.ProfilerActivity.CUDA] if ON_GPU else [torch.profiler.ProfilerActivity.CPU]
    told: dict[str, Any] = {}
    synchronize()
    with torch.profiler.profile(activities=activities) as trace:
        start = time.perf_counter()
        yield told
        synchronize()
        told["seconds"] = time.perf_counter() - start
    time_of = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    kernels = sorted(trace.key_averages(), key=lambda kernel: -getattr(kernel, time_of))
    told["seconds_in_kernels"] = sum(getattr(kernel, time_of) for kernel in kernels) / 1e6
    told["kernels"] = {k.key[:120]: f"{getattr(k, time_of) / 1e6:.5f} s, {k.count} calls" for k in kernels[:20]}


def steps(record: Record, part: str, *, small: bool) -> None:
    """Three steps of an algorithm, and a fourth whose phases are profiled, where they do not overlap."""
    by_torch = mock.patch.object(logprobs, "_suits_kernels", lambda hidden: False)
    with by_torch if part == "operations" else contextlib.nullcontext():
        record.measure(part, lambda: _steps(VARIANTS[part], small=small))


def _steps(words: list[str], *, small: bool) -> dict[str, Any]:
    from hybrid_rlhf.cli.rl import main
    from hybrid_rlhf.configs.rl import RLConfig
    from hybrid_rlhf.planning.device import GPU_RESERVE_GIB, Device
    from hybrid_rlhf.planning.room import resolve_keep_weights
    from hybrid_rlhf.planning.step_memory import Planner
    from hybrid_rlhf.runtime.command_line import parse_config
    from hybrid_rlhf.runtime.observability.metrics import read_metrics

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = _line(folder, small=small) + words
        total = torch.cuda.get_device_properties(0).total_memory if ON_GPU else 16 * GIB
        machine = Device(DEVICE, 1, total - GPU_RESERVE_GIB * GIB)
        config = resolve_keep_weights(parse_config(RLConfig, line), solo_world(DEVICE))
        plan = {phase.name: phase.total / GIB for phase in Planner(machine).phases(config)}
        with _watched() as syncs, _profiled_phases(_STEPS) as phases:
            try:
                main(line)
            except SystemExit as stop:
                if stop.code:
                    raise RuntimeError(f"the step ended with {stop.code}: see its lines above") from stop
        told = [line for line in read_metrics(folder / "run") if "time/step_seconds" in line][:_STEPS]
    keys = ("time/", "memory/", "perf/", "rollout/logprob_abs_diff_mean", "rollout/tokens_per_second", "kl")
    return {
        "plan_gib": plan,
        "weight_syncs_gib": syncs,
        "steps": [{key: value for key, value in line.items() if key.startswith(keys)} for line in told],
        "profiled": phases,
    }


@contextlib.contextmanager
def _profiled_phases(steps: int) -> Iterator[dict[str, Any]]:
    """Kernels of each phase of the step after a number of steps, by phase."""
    from hybrid_rlhf.rl.trainer import RLTrainer

    phases: dict[str, Any] = {}
    step, timed = RLTrainer.step, Timers.__call__

    @contextlib.contextmanager
    def profiled(self: Timers, name: str) -> Iterator[None]:
        with timed(self, name), _profiled() as told:
            yield
        phases[name] = told

    def stepped(self: RLTrainer, index: int) -> dict[str, float]:
        with mock.patch.object(Timers, "__call__", profiled if index > steps else timed):
            return step(self, index)

    with mock.patch.object(RLTrainer, "step", stepped):
        yield phases


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
        str(_STEPS + 1),
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
