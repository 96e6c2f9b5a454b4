"""The server against its own engine: throughput, first tokens, and many streams of which some are abandoned.

    python -m benchmarks.serving MODEL                       # all, five rounds, ten minutes of streams
    python -m benchmarks.serving MODEL --rounds 1 --soak_seconds 5 --new_tokens 16 --arrivals 10   # a quick look
    python -m benchmarks.serving MODEL --parts arrivals soak

`throughput`: tokens per second of 32 concurrent clients and of one call of the engine with the same prompts, seeds and
lengths, in turn in one run; medians, and the median of the rounds' ratios. `first_token`: seconds to the first token of
a stream on an idle server, of the engine's prefill with its first token, and of one decoding step. `arrivals`: first
tokens of requests that arrive at random times while 16 streams decode, in seconds and in steps: a running stream gets a
token in each step, so its tokens count them, whatever else the machine does. The prefill is that of the same requests
on the idle server. `soak`: 400 streams for ten minutes, a third of which disconnect midway; answers that end are
compared with the engine's, token by token, and the server's memory is read twenty times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

from hybrid_rlhf.cli.saved_models.loading import load_engine
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.generation import GenerationEngine, SamplingParams

CLIENTS, STREAMS, KINDS, PROMPT_TOKENS, MOST_TOKENS, TOP_K = 32, 400, 16, 64, 2048, 50
DECODING = 16
"""Number of streams that decode while other requests arrive."""
READINGS = 20
NAME = "model"
PARTS = ["throughput", "first_token", "arrivals", "soak"]


def prompts(count: int) -> list[list[int]]:
    """Random token ids, of similar lengths."""
    chance = random.Random(0)
    return [[chance.randrange(100, 250) for _ in range(PROMPT_TOKENS + place % 7)] for place in range(count)]


def sampling(seed: int, tokens: int) -> SamplingParams:
    """A completion of exactly so many tokens, of the likely ones: two sums of another order seldom draw two tokens."""
    return SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens, seed=seed, top_k=TOP_K)


def body(prompt: list[int], seed: int, tokens: int, **more: Any) -> dict[str, Any]:
    """The same as a request."""
    limits = {"max_tokens": tokens, "min_tokens": tokens, "seed": seed, "top_k": TOP_K}
    return {"model": NAME, "prompt": prompt, "return_token_ids": True, **limits, **more}


@contextmanager
def server(model: str, rows: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server of its own process, and its URL."""
    line = [model, "--port", "0", "--model_name", NAME, "--max_batch_rows", str(rows), "--max_queue", "1024"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hybrid_rlhf", "serve", *line, "--max_sequence_tokens", str(MOST_TOKENS)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)/v1", process.stdout.readline())
        assert found is not None, "the server did not start"
        yield found[1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


async def ask_all(url: str, tokens: int) -> float:
    """Tokens per second of concurrent clients."""
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=CLIENTS)) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.post(f"{url}/v1/completions", json=body(prompt, seed, tokens))
                for seed, prompt in enumerate(prompts(CLIENTS))
            )
        )
        seconds = time.perf_counter() - start
    assert all(answer.status_code == 200 for answer in answers)
    return CLIENTS * tokens / seconds


def generate_all(engine: GenerationEngine, tokens: int) -> float:
    """Tokens per second of one call."""
    given = prompts(CLIENTS)
    start = time.perf_counter()
    engine.generate(given, [sampling(seed, tokens) for seed in range(CLIENTS)])
    return CLIENTS * tokens / (time.perf_counter() - start)


def throughput(url: str, engine: GenerationEngine, rounds: int, tokens: int) -> dict[str, float]:
    """Medians, after a round of warm-up."""
    asyncio.run(ask_all(url, tokens)), generate_all(engine, tokens)
    pairs = [(asyncio.run(ask_all(url, tokens)), generate_all(engine, tokens)) for _ in range(rounds)]
    return {
        "served_tokens_per_second": statistics.median(served for served, _ in pairs),
        "offline_tokens_per_second": statistics.median(offline for _, offline in pairs),
        "ratio": statistics.median(served / offline for served, offline in pairs),
        "ratio_low": min(served / offline for served, offline in pairs),
        "ratio_high": max(served / offline for served, offline in pairs),
    }


async def stream_times(url: str, prompt: list[int], seed: int, tokens: int) -> list[float]:
    """Seconds from the request to each token of a stream."""
    times = []
    async with httpx2.AsyncClient(timeout=600) as client:  # it reads certificates, which is no part of the request
        start = time.perf_counter()
        async with client.stream(
            "POST", f"{url}/v1/completions", json=body(prompt, seed, tokens, stream=True)
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter() - start)
    return times


def first_token(url: str, engine: GenerationEngine, rounds: int) -> dict[str, float]:
    """Medians of a stream's first token, of the engine's first token, and of a step."""
    streamed, prefills, steps = [], [], []
    for seed, prompt in enumerate(prompts(rounds + 1)):
        prompt = [token + seed % 7 for token in prompt] * 4  # no prefix is cached
        times = asyncio.run(stream_times(url, prompt, seed, 16))
        start = time.perf_counter()
        engine.generate([prompt], sampling(seed, 1))
        if seed:  # the first warms up
            prefills.append(time.perf_counter() - start)
            streamed.append(times[0])
            steps.append(statistics.median(b - a for a, b in zip(times, times[1:], strict=False)))
    return {
        "first_token_seconds": statistics.median(streamed),
        "prefill_seconds": statistics.median(prefills),
        "step_seconds": statistics.median(steps),
        "steps_after_prefill": statistics.median(
            (first - prefill) / step for first, prefill, step in zip(streamed, prefills, steps, strict=True)
        ),
    }


async def first_token_time(client: httpx2.AsyncClient, url: str, prompt: list[int], seed: int) -> float:
    """Seconds from a request to its first token."""
    start = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body(prompt, seed, 2, stream=True)) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - start
    raise RuntimeError("a stream has ended without a token")


async def arrive(url: str, count: int) -> dict[str, float]:
    """First tokens of requests on the idle server, then while streams decode."""
    chance = random.Random(1)
    new_prompts = [[chance.randrange(100, 250) for _ in range(PROMPT_TOKENS)] for _ in range(2 * count)]
    times: list[list[float]] = [[] for _ in range(DECODING)]
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=DECODING + 4)) as client:
        idle = [await first_token_time(client, url, prompt, 0) for prompt in new_prompts[:count]]

        async def decode(number: int, prompt: list[int]) -> None:
            asked = body(prompt, number, MOST_TOKENS - 128, stream=True)
            async with client.stream("POST", f"{url}/v1/completions", json=asked) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        times[number].append(time.perf_counter())

        decoding = [asyncio.create_task(decode(number, prompt)) for number, prompt in enumerate(prompts(DECODING))]
        while min(map(len, times)) < 5:
            await asyncio.sleep(0.05)
        before = time.perf_counter()
        await asyncio.sleep(3)
        alone = [time for time in times[0] if time > before]
        seconds, steps = [], []
        for prompt in new_prompts[count:]:
            await asyncio.sleep(chance.uniform(0, 0.2))
            done = len(times[0])
            seconds.append(await first_token_time(client, url, prompt, 0))
            steps.append(len(times[0]) - done)
        assert not any(task.done() for task in decoding), "the streams have ended before the last request"
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    prefill = statistics.median(idle[1:])
    step = statistics.median(b - a for a, b in zip(alone, alone[1:], strict=False))
    late = [(value - prefill) / step for value in seconds]
    return {
        "requests": count,
        "prefill_seconds": prefill,
        "step_seconds": step,
        "first_token_seconds_p50": statistics.median(seconds),
        "first_token_seconds_p99": percentile(seconds, 99),
        "steps_after_prefill_p50": statistics.median(late),
        "steps_after_prefill_p99": percentile(late, 99),
        "counted_steps_p50": statistics.median(steps),
        "counted_steps_p99": percentile(steps, 99),
    }


def percentile(values: list[float] | list[int], percent: int) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


class Soak:
    """Streams that are opened again as soon as they end, until the time is up."""

    def __init__(self, url: str, expected: list[list[int]], tokens: int) -> None:
        self._url, self._expected, self._tokens = url, expected, tokens
        self.finished = self.abandoned = self.wrong = self.lost = 0

    async def run(self, seconds: float, process: psutil.Process) -> list[int]:
        """Resident bytes of the server, at equal intervals."""
        end, resident = time.monotonic() + seconds, list[int]()
        # new connections: the server closes idle ones after seconds, which a slow client may be about to use
        limits = httpx2.Limits(max_connections=STREAMS, max_keepalive_connections=0)
        async with httpx2.AsyncClient(timeout=600, limits=limits) as client:
            streams = [asyncio.create_task(self._repeat(client, number, end)) for number in range(STREAMS)]
            for _ in range(READINGS):
                await asyncio.sleep(seconds / READINGS)
                resident.append(process.memory_info().rss)
            await asyncio.gather(*streams)
        return resident

    async def _repeat(self, client: httpx2.AsyncClient, number: int, end: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            kind = chance.randrange(KINDS)
            leaves = chance.randrange(1, self._tokens) if chance.random() < 1 / 3 else None
            await self._stream(client, kind, leaves)

    async def _stream(self, client: httpx2.AsyncClient, kind: int, leaves: int | None) -> None:
        asked, ids = body(prompts(KINDS)[kind], kind, self._tokens, stream=True), list[int]()
        ended = False
        async with client.stream("POST", f"{self._url}/v1/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", []):
                        ids += choice["token_ids"]
                ended = ended or line == "data: [DONE]"
                if leaves is not None and len(ids) >= leaves:
                    break
        self.abandoned += not ended and leaves is not None
        self.finished += ended
        self.lost += not ended and leaves is None
        self.wrong += ids != self._expected[kind][: len(ids)] or (ended and len(ids) != self._tokens)


def soak(url: str, engine: GenerationEngine, process: psutil.Process, seconds: float, tokens: int) -> dict[str, Any]:
    """Counts of streams, the server's memory, and how much more of it there is at the end than after a fifth."""
    expected = [
        engine.generate([prompt], sampling(kind, tokens))[0][0].token_ids for kind, prompt in enumerate(prompts(KINDS))
    ]
    streams = Soak(url, expected, tokens)
    resident = asyncio.run(streams.run(seconds, process))
    counts = {name: getattr(streams, name) for name in ("finished", "abandoned", "lost", "wrong")}
    early = statistics.median(resident[READINGS // 5 : READINGS // 5 + 3])
    end = statistics.median(resident[-3:])
    gib = [round(value / 2**30, 4) for value in resident]
    return {**counts, "streams": STREAMS, "seconds": seconds, "growth": end / early - 1, "gib": gib}


def main() -> None:
    """Measure, and print or write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--soak_seconds", type=float, default=600.0)
    parser.add_argument("--arrivals", type=int, default=200, help="requests that arrive while others decode")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    engine, _ = load_engine(InferenceConfig(path=args.model))
    result: dict[str, Any] = {}
    with server(args.model, CLIENTS) as (url, process):
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "throughput": lambda: throughput(url, engine, args.rounds, args.new_tokens),
            "first_token": lambda: first_token(url, engine, args.rounds),
            "arrivals": lambda: asyncio.run(arrive(url, args.arrivals)),
            "soak": lambda: soak(url, engine, process, args.soak_seconds, args.new_tokens // 2),
        }
        for part in args.parts:
            result[part] = parts[part]()
            print(part, result[part], file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
