"""Parts of `benchmarks.gpu_hour` on steps: what limits one, and generation beside its peers.

A step runs as users start it (`hybrid_rlhf.cli.rl`), on a random model; its phases are profiled once, and the run's
report has the memory of each phase beside the plan.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
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

from benchmarks.generation import DTYPE, SHAPES, make_work, ours
from benchmarks.gpu_record import DEVICE, ON_GPU, Record, limits, seconds, synchronize
from benchmarks.in_turn import ROOT, words
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.operations import training_operations
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.loop.report.writing import JSON_FILE
from hybrid_rlhf.models.lora import add_lora
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import adapt_model
from hybrid_rlhf.planning.calibration import launch_microseconds
from hybrid_rlhf.runtime.observability.timers import Timers, peak_memory_gib
from hybrid_rlhf.runtime.world import close_world, init_world, solo_world
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
_OPTIONS = ("model", "scenario", "requests", "prompt_tokens", "new_tokens", "runs")
VARIANTS = {
    "grpo_8192": "grpo --train.micro_batch_tokens 8192",
    "grpo": "grpo",
    "ppo": "ppo",
    "deterministic": "grpo --deterministic true",
    "lag": "grpo --rollout.max_lag 1 --algorithm.correction.method truncate --rollout.kv_cache_gib "
    + ("8" if ON_GPU else "0.1"),
    "offload": "grpo --rollout.offload_states true --rollout.offload_frozen true --model.gradient_checkpointing true "
    "--model.activation_offload true",
    "lora": "grpo --actor.lora.rank 16",
    "nf4": "grpo --actor.lora.rank 16 --model.quantization nf4",
}
"""Algorithm and options of step 3 for each part."""


def host(record: Record, *, small: bool) -> None:
    """How fast the host launches and computes, so that figures of hosts compare, and the limits of the device."""
    record.measure("launch", lambda: {"microseconds": launch_microseconds(DEVICE)})
    record.measure("5M additions", lambda: {"seconds": seconds(_additions, runs=3)})
    record.measure("limits", lambda: limits(small=small))


def _additions() -> None:
    total = 0
    for number in range(5_000_000):
        total += number


def generation(record: Record, *, small: bool) -> None:
    """`benchmarks.generation` at the shapes of real models, each in a process of its own."""
    record.measure("limits", lambda: limits(small=small))
    vllm = os.environ.get("GPU_HOUR_VLLM_PYTHON")
    for name, settings in (SMALL_GENERATION if small else GENERATION).items():
        record.measure(name, lambda s=settings: _generation(s.split(), ["--vllm_python", vllm] if vllm else []))


def _generation(settings: list[str], more: list[str]) -> dict[str, Any]:
    line = [*words(dict(zip(_OPTIONS, settings, strict=False))), "--peers", *settings[len(_OPTIONS) :], *more]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.generation", *line, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        result = json.loads(file.read_text())
    speeds = {
        name: result["useful_tokens"] / sorted(times)[len(times) // 2] for name, times in result["seconds"].items()
    }
    return {"useful_tokens_per_second": speeds, "share_of_products": speeds["this engine"] / speeds["matrix products"]}


def _random_model(name: str, *, small: bool, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        **(TINY if small else SHAPES[name]),
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device(DEVICE):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def updates(record: Record, *, small: bool) -> None:
    """Twenty updates of all weights in bfloat16, with gradients summed in float32 and in bfloat16."""
    for kind in ("fp32", "bf16"):
        record.measure(f"gradients summed in {kind}", lambda k=kind: _update_figures(k, small=small))


def _update_figures(kind: str, *, small: bool) -> dict[str, Any]:
    overrides = {"data_types": {"grad_accum_dtype": kind}}
    model, optimizer = ModelConfig(dtype="bfloat16"), OptimizerConfig(lr=1e-6)
    with tempfile.TemporaryDirectory() as folder:
        _random_model(MODEL, small=small, dtype=torch.bfloat16).save_pretrained(folder)
        spec = EngineSpec("actor", folder, model, ZeroConfig(), 0, optimizer, deepspeed_overrides=overrides)
        engine = build_engine(spec, init_world())
    ids = _rows(2 if small else 20)
    real = torch.ones_like(ids)

    def accumulate() -> None:
        engine.backward(engine(ids, real, real)[0].sum(), count=ids.numel())

    figures = {name: list[float]() for name in ("backward_ms", "update_ms")}
    for number in range(4 if small else 22):  # the first two warm up
        for name, run in zip(figures, (accumulate, engine.step), strict=True):
            taken = seconds(run, runs=1, warmup=0)
            if number > 1:
                figures[name].append(1e3 * taken)
    accumulate()
    with _profiled() as told:
        engine.step()
    close_world()
    return {**{name: statistics.median(taken) for name, taken in figures.items()}, "update": told}


def lora_7b(record: Record, *, small: bool) -> None:
    """An update of a 7B model with LoRA of rank 16 by one micro-batch of 8,000 tokens, its layers kept or not."""
    record.measure("an update", lambda: _lora_figures(small=small))


def _lora_figures(*, small: bool) -> dict[str, float]:
    model = _random_model("qwen2.5-7b", small=small)
    adapt_model(model, ModelConfig())
    add_lora(model, LoraConfig(rank=16), "causal_lm", seed=0)
    policy = Policy(model)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], fused=True)
    ids = _rows(2 if small else 20)
    real = torch.ones_like(ids)

    def forward() -> None:
        with torch.no_grad():
            policy(ids, real, real)

    def update() -> None:
        policy(ids, real, real)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    needed = training_operations(model).of_rows(real.sum(dim=1), head_tokens=ids.numel())
    figures = {"forward_ms": 1e3 * seconds(forward, runs=4), "update_ms": 1e3 * seconds(update, runs=4)}
    figures["tflop_per_second"] = needed / figures["update_ms"] / 1e9
    return {**figures, "peak_gib": peak_memory_gib(DEVICE)}


def _rows(count: int) -> torch.Tensor:
    """Ids of rows of 400 tokens."""
    return torch.randint(3, 500, (count, 400), device=DEVICE)


def decoding(record: Record, *, small: bool) -> None:
    """Decoding steps of 512 rows: wall-clock, kernels, and garbage collections."""
    record.measure("256 decoding steps", lambda: _decoding(small=small))


def _decoding(*, small: bool) -> dict[str, Any]:
    model = _random_model(MODEL, small=small)
    decoder = decoder_of(model, world=solo_world(DEVICE), dtype=model.dtype)
    assert decoder is not None, "a Llama has an inference layout"
    rows, prompt, new = (4, 8, 9) if small else (512, 128, 257)
    work = {"requests": rows, "prompt_tokens": prompt, "new_tokens": new, "n": 1}
    run = ours(decoder, make_work("uniform", vocabulary=model.config.vocab_size, **work))
    run()
    collections: list[tuple[str, int, float]] = []

    def noted(phase: str, about: dict[str, int]) -> None:
        collections.append((phase, about["generation"], time.perf_counter()))

    gc.callbacks.append(noted)
    taken = seconds(run, runs=1, warmup=0)
    gc.callbacks.remove(noted)
    pauses = [(kind, end - start) for (_, kind, start), (_, _, end) in zip(*[iter(collections)] * 2, strict=True)]
    told: dict[str, Any] = {"seconds": taken}
    for kind in range(3):
        mine = [pause for generation, pause in pauses if generation == kind]
        told[f"collections of generation {kind}"] = f"{len(mine)}, {sum(mine):.4f} s"
    with _profiled() as told["profiled"]:
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
    told["launches"] = sum(kernel.count for kernel in kernels)
    told["seconds_in_kernels"] = sum(getattr(kernel, time_of) for kernel in kernels) / 1e6
    told["kernels"] = {k.key[:120]: f"{getattr(k, time_of) / 1e6:.5f} s, {k.count} calls" for k in kernels[:20]}


def steps(record: Record, part: str, *, small: bool) -> None:
    """Three steps of an algorithm, and a fourth whose phases are profiled, where they do not overlap."""
    record.measure(part, lambda: _steps(["--algorithm", *VARIANTS[part].split()], small=small))


def _steps(own: list[str], *, small: bool) -> dict[str, Any]:
    from hybrid_rlhf.cli.rl import main
    from hybrid_rlhf.runtime.observability.metrics import read_metrics

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _profiled_phases(_STEPS) as phases:
            try:
                main(_line(folder, small=small) + own)
            except SystemExit as stop:
                if stop.code:
                    raise RuntimeError(f"the step ended with {stop.code}: see its lines above") from stop
        told = [line for line in read_metrics(folder / "run") if "time/step_seconds" in line][:_STEPS]
        report = json.loads((folder / "run" / JSON_FILE).read_text())
    keys = ("time/", "memory/", "perf/", "rollout/logprob_abs_diff_mean", "kl")
    return {
        "memory": report["memory"],
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
    _random_model(MODEL, small=small).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    prompts, prompt, new = (2, 40, 8) if small else (64, 256, 256)
    rows = ({"prompt": f"{i}: " + "say it again, " * (prompt // 28)} for i in range(6 * prompts))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return words(
        {
            "model.path": folder / "model",
            "data.sources": folder / "rows.jsonl",
            "data.cache_dir": folder / "cache",
            "output_dir": folder / "run",
            "logging.sinks": "[]",
            "reward.components": json.dumps([{"function": f"{ROOT / 'benchmarks/peers/letters.py'}:letters"}]),
            "train.max_steps": _STEPS + 1,
            "rollout.prompts_per_step": prompts,
            "rollout.sampling.n": 4 if small else 8,
            "rollout.max_prompt_tokens": prompt * 2,
            "rollout.sampling.max_new_tokens": new,
        }
    )
