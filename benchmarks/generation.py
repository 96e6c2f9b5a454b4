"""Generation side by side: this engine, Hugging Face `generate` and its continuous batching, DeepSpeed's rollout
engine, and vLLM's CPU build.

    python -m benchmarks.generation                       # SmolLM2-135M, or --model small (a random Llama)
    python -m benchmarks.generation --scenario ragged --requests 64 --new_tokens 128 --peers generate generate_batch
    python -m benchmarks.generation --requests 16 --n 8 --prompt_tokens 128 --new_tokens 1   # what samples cost to read
    python -m benchmarks.generation --scenario memory --requests 64 --new_tokens 256 --peers   # little cache memory
    python -m benchmarks.generation --quantization int8 --peers
    python -m benchmarks.generation --onednn --peers      # also with the products of oneDNN
    python -m benchmarks.generation --vllm_python ENV/bin/python --json result.json
    python -m benchmarks.generation --host --model one-layer --requests 64 --n 8 --new_tokens 256  # only the host

In `memory`, requests have the same limit and end at random, after an eighth of it on average; the engine with memory
for 16 rows of full length, and with at most 16 rows, which is what a slot of full length for each would allow, run
beside it.

All peers run in turn in one run, several times after a warm-up; medians and ratios are printed. Speeds count useful
tokens: those a request asked for. The limit is what the matrix products of the same work take alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig
from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.workspace import Prompts, Workspace
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.model.layers import Linear
from hybrid_rlhf.generation.ops import cpu_kernels
from hybrid_rlhf.generation.sampling import derive_seed
from hybrid_rlhf.generation.weights.inference_weights import decoder_of
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.runtime.world import default_device, default_dtype, solo_world

DEVICE = default_device()
DTYPE = default_dtype(DEVICE)
_SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
}
SHAPES: dict[str, dict[str, Any]] = {
    "small-gemma3": {**_SMALL, "model_type": "gemma3_text", "sliding_window": 64},
    "small-olmo2": {**_SMALL, "model_type": "olmo2"},
    "small-glm4": {**_SMALL, "model_type": "glm4", "pad_token_id": 0},
    "small-moe": {
        **_SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
    },
    "small-qwen3.5": {
        **_SMALL,
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 48,
    },
    "small": _SMALL,
    "one-layer": {**_SMALL, "num_hidden_layers": 1},
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
}


@dataclass(frozen=True)
class Work:
    """Requests: prompts and how many tokens each is to get."""

    prompts: list[list[int]]
    lengths: list[int]
    n: int = 1
    limit: int | None = None
    """Of all requests, which end before it as if they had stopped; none: each has its own length as its limit."""

    @property
    def useful_tokens(self) -> int:
        """All that are asked for."""
        return sum(self.lengths) * self.n


def make_work(scenario: str, *, requests: int, prompt_tokens: int, new_tokens: int, n: int, vocabulary: int) -> Work:
    """The requests of a scenario, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(10, vocabulary - 10, (length,), generator=generator).tolist()

    if scenario == "uniform":
        return Work([prompt(prompt_tokens) for _ in range(requests)], [new_tokens] * requests, n)
    chance = (8 if scenario == "memory" else 4) / new_tokens
    stops = torch.rand(requests, generator=generator).clamp(min=1e-9).log() / math.log(1 - chance)
    lengths = [min(new_tokens, 1 + int(stop)) for stop in stops]
    sizes = torch.randint(prompt_tokens // 2, 2 * prompt_tokens, (requests,), generator=generator).tolist()
    limit = new_tokens if scenario == "memory" else None
    return Work([prompt(size) for size in sizes], lengths, n, limit)


def ours(decoder: Decoder, work: Work, *, cached: bool = False, **settings: Any) -> Callable[[], None]:
    """This engine; each request ends at its own length. `cached`: prompts of the last run are found in the cache."""
    params = [
        SamplingParams(max_new_tokens=work.limit or length, n=work.n, seed=derive_seed(0, index))
        for index, length in enumerate(work.lengths)
    ]
    backend = NativeBackend(decoder, **settings)
    engine = GenerationEngine(backend)

    def run() -> None:
        if not cached:
            backend.sync_weights(decoder)
        with ending_at(work.lengths):
            _expect(sum(len(c.token_ids) for s in engine.generate(work.prompts, params) for c in s), work)

    return run


EACH_TOKEN = property(lambda request: True, lambda request, value: None)
"""In place of `Request.streams`: a wrapped `Request.append` has each token, as for stop strings."""


@contextlib.contextmanager
def ending_at(lengths: list[int]) -> Iterator[None]:
    """Requests stop after a number of tokens that the engine does not know before."""
    append = Request.append

    def stopping(request: Request, *token: Any) -> None:
        append(request, *token)
        if len(request.token_ids) == lengths[request.prompt_index]:
            request.finish_reason = "stop"

    with mock.patch.multiple(Request, append=stopping, streams=EACH_TOKEN):
        yield


def _expect(tokens: int, work: Work) -> None:
    assert tokens == work.useful_tokens, f"{tokens} tokens for {work.useful_tokens}"


def host_times(decoder: Decoder, work: Work, runs: int) -> None:
    """Print the processor time of a decoding step on the host, where the model and the sampler cost nothing."""
    longest = max(map(len, work.prompts)) + max(work.lengths)
    token_bytes = sum(cost.bytes for cost in decoder.attention_costs.values())
    cache = 2 * len(work.prompts) * work.n * longest * token_bytes
    engine = GenerationEngine(NativeBackend(decoder, kv_cache_gib=cache / 2**30))
    marks: list[float] = []
    batches: list[int] = []

    def step(self: Workspace, batch: int, *, prompts: Prompts | None = None, **_: Any) -> torch.Tensor:
        marks.append(time.thread_time())
        batches.append(batch)
        drawing = batch + (0 if prompts is None else len(prompts.of_request))
        return torch.full((3, drawing), 5.0, dtype=torch.float64)

    medians, means = [], []
    params = [SamplingParams(max_new_tokens=length, n=work.n, seed=0) for length in work.lengths]
    with mock.patch.object(Workspace, "step", step):
        for _ in range(runs + 1):
            marks.clear()
            start = time.thread_time()
            engine.generate(work.prompts, params)
            means.append(1e3 * (time.thread_time() - start) / len(marks))
            medians.append(1e3 * statistics.median(after - mark for mark, after in itertools.pairwise(marks)))
    print(
        f"up to {max(batches)} rows: {statistics.median(medians[1:]):.3f} ms of host time in a decoding step "
        f"({min(medians[1:]):.3f} to {max(medians[1:]):.3f}), {statistics.median(means[1:]):.3f} ms with entering and "
        f"leaving ({min(means[1:]):.3f} to {max(means[1:]):.3f}); median of {runs}"
    )


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded on the left, and the mask of real tokens."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(DEVICE), mask.to(DEVICE)


def hf_generate(lm: PreTrainedModel, work: Work) -> Callable[[], None]:
    """One padded batch that runs to the longest request, as `generate` does."""
    config = GenerationConfig(
        max_new_tokens=max(work.lengths),
        min_new_tokens=max(work.lengths),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        pad_token_id=0,
        eos_token_id=None,
        num_return_sequences=work.n,
    )
    ids, mask = padded(work.prompts)

    def run() -> None:
        lm.generate(ids, attention_mask=mask, generation_config=config)

    return run


def deepspeed_rollout(lm: PreTrainedModel, work: Work) -> Callable[[], None]:
    """DeepSpeed's HybridEngineRollout, which samples through `generate`. Of an engine it uses the module only."""
    engine = HybridEngineRollout(SimpleNamespace(module=lm), SimpleNamespace(pad_token_id=0, eos_token_id=None))
    request = RolloutRequest(*padded(work.prompts))
    sampling = SamplingConfig(max(work.lengths), n_samples_per_prompt=work.n)

    def run() -> None:
        batch = engine.generate(request, sampling)
        assert batch.input_ids.shape[1] == request.prompt_ids.shape[1] + max(work.lengths)

    return run


def hf_generate_batch(lm: PreTrainedModel, work: Work) -> Callable[[], None]:
    """transformers' own continuous batching, request by request with its own length."""

    def run() -> None:
        manager = lm.init_continuous_batching(
            GenerationConfig(do_sample=True, max_new_tokens=max(work.lengths), eos_token_id=-1, pad_token_id=0)
        )
        manager.start()
        try:
            for prompt, length in zip(work.prompts, work.lengths, strict=True):
                for _ in range(work.n):
                    manager.add_request(prompt, max_new_tokens=length)
            done, tokens = 0, 0
            while done < len(work.prompts) * work.n:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done, tokens = done + 1, tokens + len(result.generated_tokens)
        finally:
            manager.stop(block=True)
            lm.set_attn_implementation("sdpa")  # it leaves its paged one
        _expect(tokens, work)

    return run


def matrix_products(decoder: Decoder, work: Work) -> Callable[[], None]:
    """The products alone: prompts read once, then each step with the rows that are live in it; tokens are spread evenly
    over experts."""
    weights, kind = decoder._weights, decoder.architecture.experts
    longest = max(work.lengths)
    rows = [sum(length > step for length in work.lengths) * work.n for step in range(1, longest)]

    def product(linear: Linear, tokens: int) -> None:
        linear(torch.ones(tokens, linear.inputs, device=DEVICE, dtype=DTYPE))

    def products(tokens: int, outputs: int) -> None:
        for layer in weights.layers:
            for linear in layer.products.values():
                product(linear, tokens)
            if kind is not None and layer.experts is not None:
                each, more = divmod(tokens * kind.per_token, kind.count)
                for place, linear in enumerate(layer.experts.products.values()):  # up and down of each expert
                    if share := each + (place // 2 < more):
                        product(linear, share)
        product(weights.head, outputs)

    def run() -> None:
        with torch.inference_mode():
            products(sum(map(len, work.prompts)), len(work.prompts))
            for live in rows:
                products(live, live)

    return run


def timed(function: Callable[[], None]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    function()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


VLLM_SCRIPT = """
import json, sys, time
if __name__ == "__main__":
    from vllm import LLM, SamplingParams, __version__
    work = json.load(open(sys.argv[1]))
    llm = LLM(work["model"], dtype=work["dtype"], max_model_len=work["context"], skip_tokenizer_init=True,
              enable_prefix_caching=False, max_num_seqs=256)
    params = [SamplingParams(temperature=1.0, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False,
                             n=work["n"]) for length in work["lengths"]]
    prompts = [{"prompt_token_ids": p} for p in work["prompts"]]
    print("ready", __version__, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert sum(len(o.token_ids) for r in outputs for o in r.outputs) == sum(work["lengths"]) * work["n"]
        print(f"seconds {seconds}", flush=True)
"""


class VLLM:
    """vLLM in its own environment and process; each call runs the work once and returns its own seconds."""

    def __init__(self, python: str, lm: PreTrainedModel, work: Work, folder: Path) -> None:
        lm.save_pretrained(folder / "model")
        content = {
            "model": str(folder / "model"),
            "prompts": work.prompts,
            "lengths": work.lengths,
            "n": work.n,
            "dtype": str(DTYPE).removeprefix("torch."),
            "context": max(map(len, work.prompts)) + max(work.lengths) + 8,
        }
        (folder / "work.json").write_text(json.dumps(content))
        (folder / "run.py").write_text(VLLM_SCRIPT)
        settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._stderr = folder / "stderr"
        self._process = subprocess.Popen(
            [python, str(folder / "run.py"), str(folder / "work.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr.open("w"),
            text=True,
            env={**os.environ, **settings, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        self.version = self._read("ready").split()[1]

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError(f"vLLM ended; see {self._stderr}")

    def seconds(self) -> float:
        """Of one run, without starting the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._read("seconds").split()[1])

    def close(self) -> None:
        """End the process and those it started: idle ones would still take a core."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def load(name: str) -> PreTrainedModel:
    """A model by folder, `embedded` for SmolLM2-135M, or random weights of a shape."""
    if name in SHAPES:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            shape = {"model_type": "llama", "max_position_embeddings": 4096, **SHAPES[name]}
            config = AutoConfig.for_model(**shape)
            return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    path = resolve_model(name, world=solo_world(DEVICE))
    lm, _ = load_model(path, "causal_lm", config=ModelConfig(), dtype=DTYPE)
    return lm.to(DEVICE).eval()  # type: ignore[arg-type, return-value]


def in_process(
    options: argparse.Namespace, lm: PreTrainedModel, decoder: Decoder, work: Work
) -> dict[str, Callable[[], None]]:
    """What runs in this process, by name."""
    peers = {"matrix products": matrix_products(decoder, work), "this engine": ours(decoder, work)}
    if options.onednn:
        with mock.patch.object(cpu_kernels, "multiplies_float32", lambda: False):
            by_onednn = decoder_of(lm, world=solo_world(DEVICE), dtype=DTYPE)
        peers["oneDNN's products"] = matrix_products(by_onednn, work)
        peers["this engine, oneDNN"] = ours(by_onednn, work)
    if options.quantization:
        quantised = decoder_of(lm, world=solo_world(DEVICE), dtype=DTYPE, quantization=options.quantization)
        peers[f"{options.quantization} products"] = matrix_products(quantised, work)
        peers[f"this engine, {options.quantization}"] = ours(quantised, work)
    if options.cached:
        peers["this engine, cached"] = ours(decoder, work, cached=True)
    if options.scenario == "memory":
        longest = max(map(len, work.prompts)) + options.new_tokens
        cache = 16 * longest * sum(cost.bytes for cost in decoder.attention_costs.values())
        peers["memory of 16 rows"] = ours(decoder, work, kv_cache_gib=cache / 2**30)
        peers["16 rows"] = ours(decoder, work, max_batch_rows=16)
    if options.n > 1:
        peers["this engine, n = 1"] = ours(decoder, replace(work, n=1))
    if "generate" in options.peers:
        peers["HF generate"] = hf_generate(lm, work)
    if "generate_batch" in options.peers:
        peers["HF generate_batch"] = hf_generate_batch(lm, work)
    if "deepspeed" in options.peers:
        peers["DeepSpeed rollout"] = deepspeed_rollout(lm, work)
    return peers


def main() -> None:
    """Measure, print a table, write JSON."""
    options = parse()
    lm = load(options.model)
    work = make_work(
        options.scenario,
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        n=options.n,
        vocabulary=lm.config.vocab_size,
    )
    decoder = decoder_of(lm, world=solo_world(DEVICE), dtype=DTYPE)
    if decoder is None:
        raise SystemExit(
            f"{options.model} has no inference weights, so there is nothing to measure: give another --model"
        )
    if options.host:
        return host_times(decoder, work, options.runs)
    lm.set_attn_implementation("sdpa")  # peers run transformers' own attention
    peers = {name: partial(timed, run) for name, run in in_process(options, lm, decoder, work).items()}
    vllm = None
    if options.vllm_python:
        vllm = VLLM(options.vllm_python, lm, work, Path(tempfile.mkdtemp()))
        peers["vLLM"] = vllm.seconds
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(options.runs + 1):
        for name, run in peers.items():
            took = run()
            time.sleep(1)  # threads of a peer may still spin
            if number:  # the first run warms up
                seconds[name].append(took)
    if vllm is not None:
        vllm.close()
    report(options, work, seconds, {} if vllm is None else {"vllm": vllm.version})


def report(
    options: argparse.Namespace, work: Work, seconds: dict[str, list[float]], peer_versions: dict[str, str]
) -> None:
    """A table on the screen, and the same as JSON."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{options.scenario}: {options.model}, {len(work.prompts)} prompts x {work.n}, {work.useful_tokens} useful "
        f"tokens; {DTYPE}, {DEVICE}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, median of {options.runs}"
    )
    for name, median in medians.items():
        times, speed = seconds[name], work.useful_tokens / median
        print(
            f"{name:18s} {speed:10.1f} tokens/s   {median:8.3f} s ({min(times):.3f} to {max(times):.3f})   "
            f"this engine is {median / medians['this engine']:.2f} x as fast"
        )
    if options.json:
        result = {
            "options": {name: value for name, value in vars(options).items() if name not in ("vllm_python", "json")},
            "useful_tokens": work.useful_tokens,
            "seconds": seconds,
            "machine": f"{torch.get_num_threads()} threads on {processor()}",
            "dtype": str(DTYPE).removeprefix("torch."),
            "date": datetime.date.today().isoformat(),
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                **peer_versions,
            },
        }
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


def processor() -> str:
    """The name of the GPU or CPU."""
    if DEVICE.type == "cuda":
        return torch.cuda.get_device_name(DEVICE)
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def parse() -> argparse.Namespace:
    """The command line; a benchmark is no part of the product and needs no more than argparse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=["uniform", "ragged", "memory"], default="uniform")
    parser.add_argument("--model", default="embedded", help=f"embedded, a folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--n", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=["generate"], choices=["generate", "generate_batch", "deepspeed"])
    parser.add_argument("--cached", action="store_true", help="also with prompts that are cached")
    parser.add_argument("--quantization", choices=["int8", "fp8"], help="also with quantised weights")
    parser.add_argument("--onednn", action="store_true", help="also with all products by oneDNN")
    parser.add_argument("--host", action="store_true", help="only the time of a decoding step on the host")
    parser.add_argument("--vllm_python", help="python of an environment with vLLM")
    parser.add_argument("--json", help="file for the raw times")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
