"""What model.head_dtype float32 costs a bfloat16 model: a training step and decoding, against logits in bfloat16.

    python -m benchmarks.head_dtype                 # SmolLM2-135M, 4 rows of 128 tokens; 32 decoded tokens of 4 rows
    python -m benchmarks.head_dtype --model FOLDER

Both sides run in this process, in turn, several times after a warm-up; on a CPU processor time of one thread counts, so
that what else runs on the machine counts little. Medians and the median of the paired ratios are
printed. A step is forward and backward of the log-probs of all tokens. Also printed: how far apart the two sides'
log-probs are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from benchmarks.training import batch, step
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.families import keep_float32_logits
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.runtime.world import default_device, solo_world

DEVICE = default_device()


ROWS, LENGTH, NEW_TOKENS = (4, 128, 32) if DEVICE.type == "cpu" else (32, 512, 128)
"""Rows of a step and their tokens, and decoded tokens of as many prompts."""


def main() -> None:
    """Print both sides and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--runs", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = resolve_model(given.model, world=solo_world(DEVICE))
    lm, _ = load_model(path, "causal_lm", config=ModelConfig(path=given.model), dtype=torch.bfloat16)
    lm.to(DEVICE)  # type: ignore[arg-type]
    print(f"{given.model}, {ROWS} x {LENGTH} tokens, {torch.get_num_threads()} threads, {DEVICE}, {torch.__version__}")
    for name, value in measured(lm, runs=given.runs).items():
        print(f"{name}: {value:.4f}")


def measured(lm: PreTrainedModel, *, runs: int) -> dict[str, float]:
    """Medians of both sides in seconds, medians of their paired ratios, and how far apart their log-probs are."""
    lm.train()
    ids, mask = batch(ROWS, LENGTH, full=True)
    ids %= lm.get_input_embeddings().num_embeddings
    policies, engines = {}, {}
    for name in ("float32", "model"):
        keep_float32_logits(lm, name == "float32")
        policies[name], engines[name] = Policy(lm), GenerationEngine.from_model(lm, stop_token_ids=())
    prompts, sampling = ids[:, :16].tolist(), SamplingParams(max_new_tokens=NEW_TOKENS)
    figures = compare("training step", lambda name: step(policies[name], ids, mask), runs)
    figures |= compare(f"decoding {NEW_TOKENS} tokens", lambda name: engines[name].generate(prompts, sampling), runs)
    with torch.no_grad():
        found = {name: policy(ids, mask, mask)[0] for name, policy in policies.items()}
    apart = (found["float32"] - found["model"]).abs()[:, 1:]
    return figures | {"log-probs apart, mean nats": float(apart.mean()), "at most": float(apart.max())}


def compare(what: str, run: Callable[[str], object], runs: int) -> dict[str, float]:
    """The medians of both, and of their paired ratios."""
    seconds: dict[str, list[float]] = {"float32": [], "model": []}
    for number in range(runs + 1):
        for name in ("float32", "model") if number % 2 else ("model", "float32"):
            taken = timed(lambda name=name: run(name))  # type: ignore[misc]
            if number:
                seconds[name].append(taken)
    ratio = statistics.median(a / b for a, b in zip(seconds["float32"], seconds["model"], strict=True))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    sides = {f"{what}, {name}, seconds": median for name, median in medians.items()}
    return {**sides, f"{what}, paired ratio": ratio}


def timed(run: Callable[[], object]) -> float:
    """Seconds on a GPU, processor seconds on a CPU."""
    if DEVICE.type == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
