"""Sampling with the weights that training has saved: an open batch of the generation engine, whose requests have
different adapters.

Requests enter the batch in turn among the tenants (tenants.py). The adapters that were used last stay in the engine;
others are read from their checkpoints when they are asked for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.generation import Completion, GenerationEngine
from hybrid_rlhf.generation.open_batch import OpenBatch, PromptBatch, StreamedToken, Submission
from hybrid_rlhf.generation.sampling import MOST_TOP_LOGPROBS
from hybrid_rlhf.models.pretrained.adapters import LowRank, stored_adapter
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.serving.training.bodies import SampleBody
from hybrid_rlhf.serving.training.futures import Future
from hybrid_rlhf.serving.training.messages import sample_response
from hybrid_rlhf.serving.training.metrics import TrainingMetrics
from hybrid_rlhf.serving.training.store import Checkpoint
from hybrid_rlhf.serving.training.tenants import FairShare

Factors = Mapping[str, LowRank]


@dataclass(eq=False)
class Weights:
    """The adapter of a checkpoint in the generation engine."""

    name: str
    loading: asyncio.Future[None]
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
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    submission: Submission | None = None
    completions: dict[int, Completion] = field(default_factory=dict)
    top: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    """Alternatives of each token, by sample."""


class Samplers:
    """Samples for all tenants. Used on the event loop only."""

    def __init__(
        self, lm: nn.Module, engine: GenerationEngine, batch: OpenBatch, *, resident: int, metrics: TrainingMetrics
    ) -> None:
        """Take the base, the engine that generates with it, its open batch, and the number of adapters that stay in the
        engine."""
        self._lm = lm
        self._engine = engine
        self.batch = batch
        self._resident = resident
        self._metrics = metrics
        self._share = FairShare()
        self._waiting: list[SampleJob] = []
        self._running = 0
        self._weights: OrderedDict[str, Weights] = OrderedDict()
        """Adapters by name, the one that was used last at the end."""
        self._kept: dict[str, Factors] = {}
        """Factors of checkpoints that were just saved, until they are first used."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Running tasks, of which the event loop has weak references alone."""

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

    def keep(self, checkpoint: Checkpoint, factors: Factors) -> None:
        """Keep the factors of a checkpoint that was just saved, so that they need not be read."""
        self._kept = {_name(checkpoint): factors, **dict(islice(self._kept.items(), self._resident - 1))}

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
            if self._running and self._running + samples > self.batch.rows:
                return
            self._waiting.remove(job)
            if job.cancelled:
                continue
            self._share.charge(job.future.tenant, len(job.prompt) + samples * job.sampling.max_new_tokens)
            self._running += samples
            task = asyncio.get_running_loop().create_task(self._sample(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._share.update(())

    async def _sample(self, job: SampleJob) -> None:
        weights = None
        try:
            weights = await self._loaded(job.checkpoint)
            if not job.cancelled:
                job.future.finish(await self._completed(job, None if weights is None else weights.name))
        except UserError as error:
            job.future.fail(str(error), by_user=True)
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            logger.error("sampling has failed", exc_info=error)
            job.future.fail("sampling has failed, the log of the server tells why", by_user=False)
        finally:
            if weights is not None:
                weights.running -= 1
            self._running -= job.sampling.n
            self._start_next()

    async def _completed(self, job: SampleJob, adapter: str | None) -> bytes:
        loop = asyncio.get_running_loop()

        def deliver(tokens: list[StreamedToken]) -> None:
            for token in tokens:
                if job.top_logprobs:
                    job.top.setdefault(token.sample, []).append(list(token.top))
                if token.completion is not None:
                    job.completions[token.sample] = token.completion
            if not tokens or len(job.completions) == job.sampling.n:
                loop.call_soon_threadsafe(job.ended.set)

        job.submission = self.batch.submit(PromptBatch([job.prompt], job.sampling, job.top_logprobs, adapter), deliver)
        logprobs = None
        if job.prompt_logprobs is not None:
            future = self.batch.prompt_logprobs(job.prompt, adapter=adapter)
            whole = [float("nan"), *(await asyncio.wrap_future(future)).logprobs]
            unscored = len(job.prompt) - job.prompt_logprobs
            logprobs = [float("nan")] * max(0, unscored) + whole[max(0, unscored) :]
        await job.ended.wait()
        if len(job.completions) < job.sampling.n and not job.cancelled:
            raise RuntimeError("the batch has ended, or this request in it has failed") from job.submission.error
        tokens = sum(len(completion.token_ids) for completion in job.completions.values())
        self._metrics.sampled_tokens.labels(job.future.tenant.name).inc(tokens)
        return sample_response(job.completions, job.top, logprobs)

    def _cancel(self, job: SampleJob) -> None:
        job.cancelled = True
        if job.submission is not None:
            self.batch.cancel(job.submission)
        job.ended.set()
        job.future.fail("sampling was cancelled", by_user=True)

    # -- adapters

    async def _loaded(self, checkpoint: Checkpoint | None) -> Weights | None:
        """The adapter of a checkpoint, in the engine and counted as needed; None for the base model."""
        if checkpoint is None:
            return None
        name = _name(checkpoint)
        weights = self._weights.get(name)
        if weights is None:
            loading = asyncio.get_running_loop().create_task(self._load(name, checkpoint))
            weights = self._weights[name] = Weights(name, loading)
        self._weights.move_to_end(name)
        weights.running += 1
        try:
            await asyncio.shield(weights.loading)
        except BaseException:
            weights.running -= 1
            self._weights.pop(name, None)
            raise
        return weights

    async def _load(self, name: str, checkpoint: Checkpoint) -> None:
        for other in list(self._weights.values()):
            if len(self._weights) <= self._resident:
                break
            if not other.running and other.loading.done():
                del self._weights[other.name]
                await self._call(partial(self._engine.remove_adapters, [other.name]))
        factors = self._kept.pop(name, None)
        if factors is None:
            factors = await asyncio.to_thread(read_factors, self._lm, str(checkpoint.folder))
        await self._call(partial(self._engine.set_adapter, name, factors))

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
