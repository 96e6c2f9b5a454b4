"""Sampling with the weights that training has saved: an open batch of the generation engine, whose requests have
different adapters.

Requests enter the batch in turn among the tenants (tenants.py). The adapters that were used last stay in the engine;
others are read from their checkpoints when they are asked for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.generation import Completion
from hybrid_rlhf.generation.open_batch import PromptBatch, StreamedToken
from hybrid_rlhf.generation.sampling import MOST_TOP_LOGPROBS
from hybrid_rlhf.models.pretrained.adapters import LowRank, stored_adapter
from hybrid_rlhf.serving.training.base import LoadedBase
from hybrid_rlhf.serving.training.bodies import SampleBody
from hybrid_rlhf.serving.training.futures import Future
from hybrid_rlhf.serving.training.messages import sample_response
from hybrid_rlhf.serving.training.metrics import TrainingMetrics
from hybrid_rlhf.serving.training.store import Checkpoint
from hybrid_rlhf.serving.training.tenants import FairShare


@dataclass(eq=False)
class Weights:
    """The adapter of a checkpoint in the generation engine."""

    name: str
    loading: asyncio.Task[None]
    running: int = 0
    """Number of requests that need it."""


@dataclass(eq=False)
class SampleJob:
    """One request."""

    future: Future
    prompt: list[int]
    sampling: SamplingParams
    checkpoint: Checkpoint | None
    """Weights; None: the base model."""
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    """Number of tokens at the end of the prompt whose log-probs are returned; None: none are asked for."""
    task: asyncio.Task[None] | None = None
    """What samples it; None: it waits for its turn."""


class Samplers:
    """Samples for all tenants. Used on the event loop only."""

    def __init__(self, base: LoadedBase, *, resident: int, metrics: TrainingMetrics) -> None:
        """Take the base, and the number of adapters that stay in the engine that generates with it."""
        self._lm = base.engine.lm
        self._engine = base.generation
        self.batch = base.batch
        self._resident = resident
        self._metrics = metrics
        self._share = FairShare()
        self._waiting: list[SampleJob] = []
        self._running: set[SampleJob] = set()
        self._weights: OrderedDict[str, Weights] = OrderedDict()
        """Adapters by name, the one that was used last at the end."""

    def job(self, body: SampleBody, future: Future, checkpoint: Checkpoint | None) -> SampleJob:
        """The job of a request.

        Raises:
            UserError: when it cannot be sampled.
        """
        prompt = body.prompt.tokens
        params = body.sampling_params
        room = self.batch.max_tokens - len(prompt)
        if room < 1 or not prompt:
            raise UserError(
                f"prompt must have 1 to {self.batch.max_tokens - 1} tokens, got {len(prompt)}: send one that fits"
            )
        if params.stop == []:
            raise UserError("stop must name what ends a completion, or be left out, got an empty list: leave it out")
        if body.topk_sample_logprobs > MOST_TOP_LOGPROBS:
            raise UserError(
                f"topk_sample_logprobs must be at most {MOST_TOP_LOGPROBS}, got {body.topk_sample_logprobs}: lower it"
            )
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        sampling = SamplingParams(
            n=body.num_samples,
            max_new_tokens=min(room, params.max_tokens or room),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            stop=tuple(text for text in stop if isinstance(text, str)),
            stop_token_ids=tuple(token for token in stop if isinstance(token, int)),
            seed=params.seed,
        )
        wanted = body.prompt_logprobs_last_n or len(prompt)
        return SampleJob(
            future, prompt, sampling, checkpoint, body.topk_sample_logprobs, wanted if body.prompt_logprobs else None
        )

    def add(self, job: SampleJob) -> None:
        """Sample when it is its tenant's turn."""
        job.future.cancel = lambda: self._cancel(job)
        self._waiting.append(job)
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting:
            self._share.update(job.future.tenant for job in self._waiting)
            job = self._share.next(self._waiting, lambda job: job.future.tenant)
            samples = job.sampling.n
            if self._running and samples + sum(other.sampling.n for other in self._running) > self.batch.rows:
                return
            self._waiting.remove(job)
            self._share.charge(job.future.tenant, len(job.prompt) + samples * job.sampling.max_new_tokens)
            self._running.add(job)
            job.task = asyncio.get_running_loop().create_task(self._sample(job))
            job.task.add_done_callback(partial(self._end, job))
        self._share.update(())

    async def _sample(self, job: SampleJob) -> None:
        weights = None if job.checkpoint is None else self._weights_of(job.checkpoint)
        try:
            if weights is not None:
                weights.running += 1
                await asyncio.shield(weights.loading)
            job.future.finish(await self._completed(job, None if weights is None else weights.name))
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            job.future.fail_with(error, "sampling")
        finally:
            if weights is not None:
                weights.running -= 1

    def _end(self, job: SampleJob, _: object) -> None:
        self._running.remove(job)
        self._start_next()

    async def _completed(self, job: SampleJob, adapter: str | None) -> bytes:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        completions: dict[int, Completion] = {}
        alternatives: dict[int, list[Sequence[tuple[int, float]]]] = {}

        def deliver(tokens: list[StreamedToken]) -> None:
            for token in tokens:
                if job.top_logprobs:
                    alternatives.setdefault(token.sample, []).append(token.top)
                if token.completion is not None:
                    completions[token.sample] = token.completion
            if not tokens or len(completions) == job.sampling.n:
                loop.call_soon_threadsafe(ended.set)

        submission = self.batch.submit(PromptBatch([job.prompt], job.sampling, job.top_logprobs, adapter), deliver)
        try:
            logprobs = None
            if job.prompt_logprobs is not None:
                future = self.batch.prompt_logprobs(job.prompt, adapter=adapter)
                whole = [float("nan"), *(await asyncio.wrap_future(future)).logprobs]
                unscored = max(0, len(job.prompt) - job.prompt_logprobs)
                logprobs = [float("nan")] * unscored + whole[unscored:]
            await ended.wait()
        finally:
            self.batch.cancel(submission)  # what is left of it, when the job was cancelled or has failed
        if len(completions) < job.sampling.n:
            raise RuntimeError("the batch has ended, or this request in it has failed") from submission.error
        tokens = sum(len(completion.token_ids) for completion in completions.values())
        self._metrics.sampled_tokens.labels(job.future.tenant.name).inc(tokens)
        return sample_response(completions, alternatives, logprobs)

    def _cancel(self, job: SampleJob) -> None:
        if job.task is None:
            self._waiting.remove(job)
        else:
            job.task.cancel()
        job.future.fail("sampling was cancelled", by_user=True)

    # -- adapters

    def _weights_of(self, checkpoint: Checkpoint) -> Weights:
        """The adapter of a checkpoint, which is in the engine when it is loaded."""
        name = _name(checkpoint)
        weights = self._weights.get(name)
        if weights is None:
            loading = asyncio.get_running_loop().create_task(self._load(name, checkpoint))
            weights = self._weights[name] = Weights(name, loading)
        self._weights.move_to_end(name)
        return weights

    async def _load(self, name: str, checkpoint: Checkpoint) -> None:
        try:
            for other in list(self._weights.values()):
                if len(self._weights) <= self._resident:
                    break
                if not other.running and other.loading.done():
                    del self._weights[other.name]
                    await self._call(partial(self._engine.remove_adapters, [other.name]))
            factors = await asyncio.to_thread(read_factors, self._lm, str(checkpoint.folder))
            await self._call(partial(self._engine.set_adapter, name, factors))
        except BaseException:
            del self._weights[name]
            raise

    async def _call(self, function: Callable[[], None]) -> None:
        await asyncio.wrap_future(self.batch.call(function))


def _name(checkpoint: Checkpoint) -> str:
    """Name of a checkpoint's adapter; one that replaces another of its path has another."""
    return f"{checkpoint.path}@{checkpoint.created}"


def read_factors(lm: nn.Module, folder: str) -> dict[str, LowRank]:
    """The factors of an adapter by the names of the weights that they change.

    Raises:
        UserError: when the folder has no adapter of this model.
    """
    stored = stored_adapter(folder)
    scale = stored.alpha / stored.rank
    names = [name.removesuffix(".lora_A.weight") for name in stored.factors if name.endswith(".lora_A.weight")]
    return {
        f"{name}.weight": LowRank(
            stored.factors[f"{name}.lora_B.weight"] * scale,
            stored.factors[f"{name}.lora_A.weight"],
            isinstance(lm.get_submodule(name), Conv1D),
        )
        for name in names
    }
