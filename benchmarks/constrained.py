"""What penalties, biases and grammars cost a decoding step, of the rows that use them and of those that do not.

    python -m benchmarks.constrained [MODEL] [--rows 32] [--rounds 7] [--new_tokens 24]

MODEL is a folder, or "embedded" (the default). Two open batches of the same model take turns: one that no such request
has reached, and one whose tables hold them all. Each round decodes the same prompts in every way; printed are the
median milliseconds of a step and the median of the rounds' ratios to the first way. `mask` is the time in which
llguidance computes the bits of all rows, which is hidden where the model runs on other cores or on a GPU.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from typing import Any

from hybrid_rlhf.cli.saved_models.loading import load_engine
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.batching.grammar import TokenMasks
from hybrid_rlhf.generation.open_batch import OpenBatch, PromptBatch, StreamedToken

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}
"""A schema that no completion of a round completes."""
FORMAT = {"type": "json_schema", "json_schema": {"schema": PEOPLE}}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {70: 1.0}}


def milliseconds(batch: OpenBatch, prompts: list[list[int]], sampling: list[SamplingParams]) -> float:
    """Median time of a step in which all rows decode."""
    arrived: queue.SimpleQueue[tuple[float, list[StreamedToken]]] = queue.SimpleQueue()
    batch.submit(PromptBatch(prompts, sampling), lambda tokens: arrived.put((time.perf_counter(), tokens)))
    moments = list[float]()
    unfinished = len(prompts)
    while unfinished:
        moment, tokens = arrived.get()
        assert tokens, "decoding has failed"
        if len(tokens) == len(prompts):
            moments.append(moment)
        unfinished -= sum(token.finish_reason is not None for token in tokens)
    return 1e3 * statistics.median(later - before for before, later in zip(moments, moments[1:], strict=False))


def main() -> None:
    """Measure in turn, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="embedded")
    for name, default in (("rows", 32), ("rounds", 7), ("new_tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = InferenceConfig(path=options.model)
    engines = [load_engine(config)[0] for _ in range(2)]
    rows = options.rows
    free = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True)
    penalised = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True, **PENALTIES)
    written = SamplingParams(max_new_tokens=options.new_tokens, response_format=FORMAT)
    ways: dict[str, tuple[int, list[SamplingParams]]] = {
        "plain": (0, [free] * rows),
        "plain, in tables of all": (1, [free] * rows),
        "one row with penalties": (1, [penalised, *[free] * (rows - 1)]),
        "all rows with penalties": (1, [penalised] * rows),
        "one row with a grammar": (1, [written, *[free] * (rows - 1)]),
        "all rows with grammars": (1, [written] * rows),
    }
    prompts = [[100 + (7 * row + place) % 200 for place in range(48 + row % 5)] for row in range(rows)]
    longest = 64 + options.new_tokens
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with (
        engines[0].open(rows=rows, max_tokens=longest) as first,
        engines[1].open(rows=rows, max_tokens=longest) as other,
    ):
        batches = (first, other)
        for name in reversed(ways):  # the tables of the second batch grow once
            milliseconds(batches[ways[name][0]], prompts, ways[name][1])
        for _ in range(options.rounds):
            for name, (place, sampling) in ways.items():
                taken[name].append(milliseconds(batches[place], prompts, sampling))
        maker = other._maker
        grammars = [grammar for _ in range(rows) if (grammar := maker.grammar(written)) is not None]
        masks = TokenMasks(rows, maker.vocab_size, engines[1].backend.decoder.world.device)
        spent = list[float]()
        for _ in range(20):
            start = time.perf_counter()
            masks.begin(list(enumerate(grammars))).done.result()
            spent.append(1e3 * (time.perf_counter() - start))
    print(f"{options.model}, {rows} rows, {options.rounds} rounds, milliseconds of a step")
    for name, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times, taken["plain"], strict=True))
        print(f"{name:26} {statistics.median(times):8.2f}  {ratio:6.3f} times plain")
    print(f"{'mask':26} {statistics.median(spent):8.2f}")


if __name__ == "__main__":
    main()
