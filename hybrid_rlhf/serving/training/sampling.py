"""Sampling with saved weights: an open batch of the generation engine, whose requests have different adapters.

Samples enter the batch one by one, by fair queueing among tenants (tenants.py). The last row is reserved for tenants
without a running sample. The most recently used adapters stay in the engine; others are read from their checkpoints
when a request needs them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
from hybrid_rlhf.serving.training.store import Checkpoint, folder_named
from hybrid_rlhf.serving.training.tenants import FairShare, Tenant


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
    """Task that samples it; None: no sample of it has been admitted."""
    admitted: int = 0
    """Number of samples that were admitted."""
    submitted: int = 0
    """Number of samples that are in the batch, or were."""
    running: int = 0
    """Number of admitted samples that have not ended."""
    adapter: str | None = None
    """Name of its weights in the engine, which stay there while it runs; None: the base model, or not known yet."""
    is_ready: bool = False
    """True when its weights are in the engine."""
    submissions: list[Any] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    alternatives: dict[int, list[Sequence[tuple[int, float]]]] = field(default_factory=dict)
    error: BaseException | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all samples have ended, or one has failed."""


class Samplers:
    """Samples the requests of all tenants. Used on the event loop only."""

    def __init__(self, base: LoadedBase, *, resident: int, metrics: TrainingMetrics, is_shared: bool) -> None:
        """Set the base, the number of adapters that stay in its generation engine, the metrics, and whether there are
        several tenants."""
        self._is_shared = is_shared
        self._lm = base.engine.lm
        self._engine = base.generation
        self.batch = base.batch
        self._resident = resident
        self._metrics = metrics
        self._share = FairShare()
        self._waiting: list[SampleJob] = []
        self._running: set[SampleJob] = set()
        self._loading: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        """Tasks that load the adapters, or have loaded them, by name; the one that was used last at the end."""

    def add(self, body: SampleBody, future: Future, checkpoint: Checkpoint | None) -> None:
        """Sample a request when it is its tenant's turn, with the weights of a checkpoint or (None) the base model.

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
            seed=secrets.randbelow(2**63) if params.seed is None else params.seed,  # the same for all parts
        )
        wanted = body.prompt_logprobs_last_n or len(prompt)
        job = SampleJob(
            future, prompt, sampling, checkpoint, body.topk_sample_logprobs, wanted if body.prompt_logprobs else None
        )
        future.cancel = lambda: self._cancel(job)
        self._waiting.append(job)
        self._start_next()

    def _start_next(self) -> None:
        """Admit samples, by fair queueing among tenants, while rows are free."""
        rows = self.batch.rows
        kept = int(self._is_shared and rows > 1)  # the last row is for tenants without a running sample
        used = Counter[Tenant]()
        for job in self._running:
            used[job.future.tenant] += job.running
        admitted: dict[SampleJob, None] = {}
        while (free := rows - used.total()) > 0:
            self._share.update(job.future.tenant for job in self._waiting)
            ready = [job for job in self._waiting if free > kept or not used[job.future.tenant]]
            if not ready:
                break
            job = self._share.next(ready, lambda job: job.future.tenant)
            self._share.charge(job.future.tenant, len(job.prompt) + job.sampling.max_new_tokens)
            job.admitted += 1
            job.running += 1
            used[job.future.tenant] += 1
            if job.admitted == job.sampling.n:
                self._waiting.remove(job)
            self._running.add(job)
            admitted[job] = None
        for job in admitted:
            if job.task is None:
                job.task = asyncio.get_running_loop().create_task(self._sample(job))
                job.task.add_done_callback(partial(self._end, job))
            elif job.is_ready:
                self._submit(job)

    async def _sample(self, job: SampleJob) -> None:
        try:
            if job.checkpoint is not None:
                job.adapter = _name(job.checkpoint)
                await asyncio.shield(self._loaded(job.adapter, job.checkpoint))
            job.is_ready = True
            job.future.finish(await self._completed(job))
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            job.future.fail_with(error, "sampling")

    def _end(self, job: SampleJob, _: object) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        self._running.discard(job)
        self._start_next()

    async def _completed(self, job: SampleJob) -> bytes:
        self._submit(job)
        try:
            logprobs = None
            if job.prompt_logprobs is not None:
                future = self.batch.prompt_logprobs(job.prompt, adapter=job.adapter)
                whole = [float("nan"), *(await asyncio.wrap_future(future)).logprobs]
                unscored = max(0, len(job.prompt) - job.prompt_logprobs)
                logprobs = [float("nan")] * unscored + whole[unscored:]
            await job.ended.wait()
        finally:
            job.is_ready = False
            for submission in job.submissions:  # the unfinished ones, when the job was cancelled or has failed
                self.batch.cancel(submission)
        if isinstance(job.error, UserError):
            raise job.error
        if len(job.completions) < job.sampling.n:
            raise RuntimeError("the batch has ended, or this request in it has failed") from job.error
        tokens = sum(len(completion.token_ids) for completion in job.completions.values())
        self._metrics.sampled_tokens.labels(job.future.tenant.name).inc(tokens)
        return sample_response(job.completions, job.alternatives, logprobs)

    def _submit(self, job: SampleJob) -> None:
        """Submit the admitted samples of a job that are not in the batch."""
        loop = asyncio.get_running_loop()
        place = len(job.submissions)

        def deliver(tokens: list[StreamedToken]) -> None:
            for token in tokens:
                if job.top_logprobs:
                    job.alternatives.setdefault(token.sample, []).append(token.top)
                if token.completion is not None:
                    job.completions[token.sample] = token.completion
            finished = sum(token.completion is not None for token in tokens)
            if finished or not tokens:
                loop.call_soon_threadsafe(self._delivered, job, place, finished)

        sampling = replace(job.sampling, n=job.admitted - job.submitted)
        prompts = PromptBatch([job.prompt], sampling, job.top_logprobs, job.adapter, first_sample=job.submitted)
        job.submitted = job.admitted
        try:
            job.submissions.append(self.batch.submit(prompts, deliver))
        except Exception as error:  # noqa: BLE001 - reported to the client of the job
            job.error = error
            job.ended.set()

    def _delivered(self, job: SampleJob, place: int, finished: int) -> None:
        """Count samples of a submission that have ended; 0 means that it has failed."""
        job.running -= finished
        if not finished:
            job.error = job.submissions[place].error
        if not finished or len(job.completions) == job.sampling.n:
            job.ended.set()
        self._start_next()

    def _cancel(self, job: SampleJob) -> None:
        if job.task is None:
            self._waiting.remove(job)
        else:
            job.task.cancel()
        job.future.fail("sampling was cancelled", by_user=True)

    # -- adapters

    def _loaded(self, name: str, checkpoint: Checkpoint) -> asyncio.Task[None]:
        """The task after which the adapter of a checkpoint is in the engine."""
        if name not in self._loading:
            self._loading[name] = asyncio.get_running_loop().create_task(self._load(name, checkpoint))
        self._loading.move_to_end(name)
        return self._loading[name]

    async def _load(self, name: str, checkpoint: Checkpoint) -> None:
        try:
            while len(self._loading) > self._resident:
                used = {job.adapter for job in self._running}
                unused = next((key for key, task in self._loading.items() if task.done() and key not in used), None)
                if unused is None:
                    break
                del self._loading[unused]
                await self._call(partial(self._engine.remove_adapters, [unused]))
            with folder_named(checkpoint.folder, checkpoint.path):
                factors = await asyncio.to_thread(read_factors, self._lm, str(checkpoint.folder))
            await self._call(partial(self._engine.set_adapter, name, factors))
        except BaseException:
            del self._loading[name]
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
