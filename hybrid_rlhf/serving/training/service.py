"""What the routes do: sessions, models and their commands, sampling sessions; and the task that feeds the engine.

Everything here runs on the event loop, except what the engine does, which one thread runs in turn. A command is
accepted in any order and answers at once with the id of its result; a request that is faulty takes its place in the
order too, and fails when it is its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.models.lora import linear_layers
from hybrid_rlhf.models.pretrained.adapters import stored_adapter
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.serving.training.bodies import (
    CommandBody,
    CreateModelBody,
    LoadBody,
    OptimStepBody,
    SampleBody,
    SamplerBody,
    SaveBody,
    SaveExternalBody,
    SaveForSamplerBody,
    read_body,
)
from hybrid_rlhf.serving.training.futures import Answer, Futures, Gone
from hybrid_rlhf.serving.training.losses import check_loss, sequence_loss
from hybrid_rlhf.serving.training.merging import write_merged
from hybrid_rlhf.serving.training.messages import ForwardBackward, forward_backward_output, read_datum
from hybrid_rlhf.serving.training.metrics import TrainingMetrics
from hybrid_rlhf.serving.training.queue import Command, CommandQueue, ModelQueue, PackedRow, TakenRow
from hybrid_rlhf.serving.training.sampling import Samplers
from hybrid_rlhf.serving.training.store import KEPT_SAMPLERS, Checkpoint, Kind, Run, Store, UnknownObject, checked_name
from hybrid_rlhf.serving.training.tenants import Tenant, Tenants
from hybrid_rlhf.serving.training.trainer import Trainer

ResultT = TypeVar("ResultT")
LORA_ALPHA = 32.0
"""Scale of every adapter, times its rank: the client has no key for it."""
_SWEEP_SECONDS = 10.0


class CommandFailed(Exception):
    """A command has failed through no fault of the client."""


@dataclass(eq=False)
class Session:
    """One client."""

    tenant: Tenant
    last_seen: float = field(default_factory=time.monotonic)
    finished: bool = False


@dataclass(eq=False)
class Model:
    """A model whose state is in the engine, or will be before its next command."""

    run: Run
    queue: ModelQueue
    ready: bool = False
    """True when its adapter is in the engine."""
    has_gradient: bool = False
    broken: str | None = None
    """Why a backward pass since the last step has failed: the step would use a part of the gradient."""
    saved: bool = True
    """True if its state is its run's saved one."""
    leaving: list[Callable[[], None]] = field(default_factory=list)
    """What is called when it has left the engine; not empty: it leaves after its commands."""


class TrainingService:
    """The service of one base model."""

    def __init__(
        self,
        trainer: Trainer,
        samplers: Samplers,
        store: Store,
        tenants: Tenants,
        *,
        session_seconds: float,
        metrics: TrainingMetrics,
    ) -> None:
        """Take its parts.

        Args:
            trainer: the engine that trains.
            samplers: what samples.
            store: runs and checkpoints on disk.
            tenants: the keys.
            session_seconds: time without a heartbeat or a command after which the models of a session leave the engine.
            metrics: what is counted.
        """
        self.trainer = trainer
        self.samplers = samplers
        self.store = store
        self.tenants = tenants
        self.metrics = metrics
        self.futures = Futures()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        """Models that have a state, by id."""
        self._session_seconds = session_seconds
        self._queue = CommandQueue(trainer.batch_tokens)
        self._wake = asyncio.Event()
        self._next_sweep = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        for tenant in tenants:
            self._follow(tenant)

    def _follow(self, tenant: Tenant) -> None:
        """Show a tenant in the metrics."""
        name = tenant.name
        self.metrics.follow("waiting_tokens", name, lambda: self._queue.waiting_tokens(tenant))
        self.metrics.follow("requests_in_flight", name, lambda: tenant.requests)
        self.metrics.follow("models", name, lambda: len(self._models_of(tenant)))
        self.metrics.follow("stored_bytes", name, lambda: self.store.stored_bytes(name))

    # -- sessions

    def create_session(self, tenant: Tenant, metadata: dict[str, Any] | None) -> str:
        """A new session's id."""
        session_id = f"s{secrets.token_hex(8)}"
        self.store.sessions.write(session_id, tenant=tenant.name, metadata=metadata)
        self.sessions[session_id] = Session(tenant)
        return session_id

    def session(self, session_id: str, tenant: Tenant) -> Session:
        """A session, which is seen now. One from before a restart continues.

        Raises:
            UnknownObject: when there is none of this key.
            Gone: when it has finished.
        """
        session = self.sessions.get(session_id)
        record = self.store.sessions.get(session_id)
        if session is None and record is not None and record["tenant"] == tenant.name:
            session = self.sessions[session_id] = Session(tenant)
        if session is None or session.tenant is not tenant:
            raise UnknownObject(f"there is no session {session_id[:100]} of this key: create one")
        if session.finished:
            raise Gone(f"session {session_id} has finished: create another")
        session.last_seen = time.monotonic()
        return session

    def finish_session(self, session_id: str, tenant: Tenant) -> None:
        """End a session: its models leave the engine when their commands have ended; what they saved stays.

        Raises:
            UnknownObject: when there is none of this key.
        """
        with contextlib.suppress(Gone):
            self.session(session_id, tenant).finished = True
            self.store.sessions.delete(session_id)
        self._next_sweep = 0.0
        self._wake.set()

    # -- models

    def create_model(self, tenant: Tenant, body: CreateModelBody, content: bytes) -> dict[str, Any]:
        """Accept a new model.

        Raises:
            UserError: for another base model, or a changed request.
            UnknownObject: for a session that there is not.
            QuotaExceeded: when the key has too much in flight.
        """
        self._require_base(body.base_model)
        lora = body.lora_config
        kinds = [kind for kind, trains in (("attn", lora.train_attn), ("mlp", lora.train_mlp)) if trains]
        run = self._new_run(tenant, body.session_id, body.model_seq_id, body.user_metadata)
        run.rank = lora.rank
        run.targets = kinds
        run.seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
        return self._create(tenant, run, content, {"model_id": run.run_id, "type": "create_model"})

    def load(self, tenant: Tenant, body: LoadBody, content: bytes) -> dict[str, Any]:
        """Accept a saved state, onto a model or as the beginning of a new one; raises as `create_model`."""
        if body.model_id is not None:
            command = CommandBody(model_id=body.model_id, seq_id=body.seq_id)
            return self._submit(tenant, "load_weights", command, content, lambda model, _: self._load(model, body))
        if body.session_id is None or body.model_seq_id is None:
            raise UserError("load_weights needs a model_id, or session_id and model_seq_id, got neither: send one")
        run = self._new_run(tenant, body.session_id, body.model_seq_id, body.user_metadata)
        run.initial_path = body.path
        run.initial_optimizer = body.optimizer
        return self._create(tenant, run, content, {"path": body.path, "model_id": run.run_id, "type": "load_weights"})

    def _new_run(self, tenant: Tenant, session_id: str, number: int, metadata: dict[str, Any] | None) -> Run:
        self.session(session_id, tenant)
        run_id = f"{session_id}:train:{number}"
        return Run(run_id, tenant.name, session_id, 0, [], 0, time.time(), metadata=metadata or {})

    def _create(self, tenant: Tenant, run: Run, content: bytes, answer: dict[str, Any]) -> dict[str, Any]:
        """Accept a new model; `answer` is its result, whose type is the command's name."""
        name = answer["type"]
        future, is_new = self.futures.open(f"{run.run_id}:0", tenant, name.encode() + content)
        if is_new and run.run_id in self.store.runs:  # it was made before a restart
            future.finish(answer)
        elif is_new:
            model = Model(run, ModelQueue(run.run_id, tenant, next_seq=0))

            def begin() -> Answer:
                if len(self._models_of(tenant)) > tenant.quotas.models:
                    raise UserError(
                        f"key {tenant.name} may have {tenant.quotas.models} models in training: unload one, or finish "
                        "the session of one"
                    )
                self._put_into_engine(model)
                self.store.write_run(run)
                return answer

            self._add(model, 0, Command(name, future, begin))
        return {"request_id": future.request_id, "model_id": run.run_id}

    def _add(self, model: Model, seq: int, command: Command) -> None:
        """Add a command to a model, which is known from now on."""
        self.models[model.run.run_id] = model
        self._queue.models[model.run.run_id] = model.queue
        model.queue.add(seq, command)
        self._wake.set()

    def info(self, tenant: Tenant, model_id: str) -> Run:
        """The run of a model.

        Raises:
            UnknownObject: when there is none of this key.
        """
        model = self.models.get(model_id)
        run = self.store.runs.get(model_id) if model is None else model.run
        if run is None or run.tenant != tenant.name:
            raise UnknownObject(f"there is no model {model_id[:200]} of this key: create one")
        return run

    def unload(self, tenant: Tenant, model_id: str, content: bytes) -> dict[str, Any]:
        """Accept the end of a model, after its commands so far; raises as `create_model`."""
        self.info(tenant, model_id)
        request_id = f"{model_id}:unload:{secrets.token_hex(4)}"
        future, _ = self.futures.open(request_id, tenant, content)
        answer = {"model_id": model_id, "type": "unload_model"}
        model = self.models.get(model_id)
        if model is None:
            future.finish(answer)
        else:
            model.leaving.append(lambda: future.finish(answer))
            self._next_sweep = 0.0
            self._wake.set()
        return {"request_id": request_id, "model_id": model_id}

    # -- commands

    def forward_backward(self, tenant: Tenant, request: ForwardBackward, content: bytes) -> dict[str, Any]:
        """Accept a forward pass, usually with a backward pass; raises as `create_model`, or Gone."""
        body = read_body({"model_id": request.model_id, "seq_id": request.seq_id}, CommandBody)
        return self._submit(tenant, "forward_backward", body, content, lambda model, _: self._rows(model, request))

    def optim_step(self, tenant: Tenant, body: OptimStepBody, content: bytes) -> dict[str, Any]:
        """Accept an update; raises as `create_model`, or Gone."""
        params = body.adam_params
        adam = AdamStep(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.grad_clip_norm,
        )
        return self._submit(tenant, "optim_step", body, content, lambda model, _: lambda: self._step(model, adam))

    def save(
        self, tenant: Tenant, body: SaveBody | SaveForSamplerBody | SaveExternalBody, content: bytes
    ) -> dict[str, Any]:
        """Accept a save; raises as `create_model`, or Gone."""
        names: dict[type[CommandBody], tuple[str, Kind]] = {
            SaveBody: ("save_weights", "weights"),
            SaveForSamplerBody: ("save_weights_for_sampler", "sampler_weights"),
            SaveExternalBody: ("save_weights_external", "external_weights"),
        }
        name, kind = names[type(body)]

        def prepare(model: Model, seq: int) -> Callable[[], Answer]:
            return lambda: {**self._save(model, body, kind, seq), "type": name}

        return self._submit(tenant, name, body, content, prepare)

    def reject(self, tenant: Tenant, body: CommandBody, name: str, content: bytes, error: UserError) -> dict[str, Any]:
        """Accept a faulty command in its place: it fails when it is its turn, and later ones go on."""
        return self._submit(tenant, name, body, content, lambda *_: partial(_fail, error))

    def _submit(
        self,
        tenant: Tenant,
        name: str,
        body: CommandBody,
        content: bytes,
        prepare: Callable[[Model, int], Callable[[], Answer] | list[PackedRow]],
    ) -> dict[str, Any]:
        """Accept a command; `prepare` returns what the engine's thread does, or the rows that it computes."""
        run = self.info(tenant, body.model_id)
        run.last_request = time.time()
        if (session := self.sessions.get(run.session_id)) is not None:
            session.last_seen = time.monotonic()
        known = self.models.get(run.run_id)
        # if it is not known, its state is read from its run's saved one before this command
        model = known or Model(run, ModelQueue(run.run_id, tenant, next_seq=run.saved_seq + 1))
        seq = model.queue.last_seq + 1 if body.seq_id is None else body.seq_id
        request_id = f"{run.run_id}:{seq}"
        if known is None and seq > model.queue.next_seq:
            raise Gone(
                f"the server has stopped since, and the updates of {run.run_id} after "
                f"{run.saved_path or 'its beginning'} are lost: create a training client from that state"
            )
        future, is_new = self.futures.open(request_id, tenant, name.encode() + content)
        if is_new and seq < model.queue.next_seq:  # it ended before, and its result was forgotten
            saved = self.store.of_command(run.run_id, seq)
            if saved is None:
                future.fail("the result of this request was forgotten", by_user=False)
            else:
                future.finish({**self._saved_answer(saved), "type": name})
        elif is_new:
            self.sessions.setdefault(run.session_id, Session(tenant))
            try:
                work = prepare(model, seq)
            except UserError as error:
                work = partial(_fail, error)
            command = Command(name, future, work) if callable(work) else Command(name, future, rows=work)
            self._add(model, seq, command)
        return {"request_id": request_id, "model_id": run.run_id}

    def _rows(self, model: Model, request: ForwardBackward) -> list[PackedRow]:
        check_loss(request.loss, request.loss_config)
        if not len(request.data):
            raise UserError("data must have at least one datum, got none: send some")
        rows = []
        for index, message in enumerate(request.data):
            datum = read_datum(message, index)
            length = len(datum.tokens)
            if not 1 <= length <= self.trainer.max_tokens:
                raise UserError(
                    f"model_input must have 1 to {self.trainer.max_tokens} tokens, datum {index} has {length}: split it"
                )
            targets = datum.inputs.get("target_tokens")
            targets = targets.reshape(-1) if targets is not None and targets.ndim == 2 else targets
            if targets is None or targets.shape != (length,) or targets.dtype.kind != "i":
                raise UserError(
                    f"target_tokens must be one token id for each of the {length} tokens of model_input, datum {index} "
                    "has others: send as many"
                )
            for key, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
                if ids.min() < 0 or ids.max() >= self.trainer.vocabulary:
                    raise UserError(
                        f"{key} must be token ids in 0..{self.trainer.vocabulary - 1}, datum {index} has "
                        f"{ids.min()}..{ids.max()}: use the tokenizer of the model"
                    )
            loss = sequence_loss(request.loss, request.loss_config, datum, index)
            row = self.trainer.make_row(
                model.run.run_id,
                tokens=torch.from_numpy(datum.tokens),
                targets=torch.from_numpy(targets.astype(np.int64)),
                loss=None if request.forward_only else loss,
            )
            rows.append(PackedRow(row, length, loss, learns=not request.forward_only))
        return rows

    # -- on the engine's thread

    def _put_into_engine(self, model: Model) -> None:
        """Read the state that a model has by its run."""
        run = model.run
        engine = self.trainer.engine
        if run.saved_path is not None:
            engine.load(run.run_id, self._state(run.saved_path, run).folder, with_optimizer=True)
        elif run.initial_path is not None:
            initial = self._state(run.initial_path, run)
            run.rank = initial.rank
            engine.load(run.run_id, initial.folder, with_optimizer=run.initial_optimizer)
        else:
            lora = LoraConfig(rank=run.rank, alpha=LORA_ALPHA, target_modules=self._target_modules(run.targets))
            engine.add(run.run_id, lora, seed=run.seed)
        model.ready = True

    def _state(self, path: str, run: Run) -> Checkpoint:
        checkpoint = self.store.find(path, run.tenant)
        if checkpoint.kind == "external_weights":
            raise UserError(f"a merged model is no adapter, got {path}: give one of save_weights")
        return checkpoint

    def _target_modules(self, kinds: list[str]) -> str | list[str]:
        if len(kinds) == 2:
            return "all-linear"
        if not kinds:
            raise UserError(
                "an adapter needs attention or MLP layers, as the head has none: set train_attn or train_mlp"
            )
        lm = self.trainer.engine.lm
        names = linear_layers(lm, lm.get_output_embeddings())
        return [name for name in names if ("attn" in name or "attention" in name) == (kinds == ["attn"])]

    def _step(self, model: Model, adam: AdamStep) -> Answer:
        engine = self.trainer.engine
        broken = model.broken
        if broken is not None or not model.has_gradient:
            engine.zero_gradient(model.run.run_id)
            model.has_gradient = False
            model.broken = None
            if broken is not None:
                raise CommandFailed(f"a backward pass of this step has failed, and the step is left out: {broken}")
            raise UserError("optim_step needs a forward_backward since the last one, got none: send one first")
        stats = engine.step(model.run.run_id, adam)
        model.has_gradient = False
        model.saved = False
        self.metrics.steps.labels(model.run.tenant).inc()
        metrics = {key: stats[key] for key in ("grad_norm", "skipped")}  # a step would replace the client's own
        return {"metrics": metrics, "type": "optim_step"}

    def _load(self, model: Model, body: LoadBody) -> Callable[[], Answer]:
        def run() -> Answer:
            folder = self._state(body.path, model.run).folder
            self.trainer.engine.load(model.run.run_id, folder, with_optimizer=body.optimizer)
            model.has_gradient = False
            model.broken = None
            model.saved = False
            return {"path": body.path, "model_id": model.run.run_id, "type": "load_weights"}

        return run

    def _save(
        self, model: Model, body: SaveBody | SaveForSamplerBody | SaveExternalBody, kind: Kind, seq: int
    ) -> dict[str, Any]:
        run = model.run
        engine = self.trainer.engine
        self._require_room(model.queue.tenant)
        sampler = body.sampling_session_seq_id if isinstance(body, SaveForSamplerBody) else None
        checkpoint = Checkpoint(
            run.run_id,
            kind,
            checked_name(body.path) if body.path is not None else f"command-{seq}",
            run.tenant,
            run.rank,
            seq,
            time.time(),
            0,
            expires=None if body.ttl_seconds is None else time.time() + body.ttl_seconds,
            unnamed=kind == "sampler_weights" and body.path is None,
            sampler=None if sampler is None else f"{run.session_id}:sample:{sampler}",
            metadata=body.user_metadata or {},
        )

        def write(folder: Path) -> None:
            if kind == "external_weights":
                write_merged(engine.lm, engine.factors(run.run_id), folder, tokenizer=self.trainer.tokenizer)
            else:
                engine.save(run.run_id, folder, with_optimizer=kind == "weights")

        self.store.write_checkpoint(checkpoint, write, overwrite=isinstance(body, SaveBody) and body.overwrite)
        if checkpoint.sampler is not None:
            self.store.samplers.write(checkpoint.sampler, tenant=run.tenant, path=checkpoint.path)
        if kind == "sampler_weights":
            factors = engine.factors(run.run_id)
            self._loop.call_soon_threadsafe(self.samplers.keep, checkpoint, factors)
        if not model.has_gradient and model.broken is None:  # a gradient is not saved
            if kind == "weights":
                model.saved = True
                run.saved_path = checkpoint.path
            if model.saved:
                run.saved_seq = seq
                self.store.write_run(run)
        return self._saved_answer(checkpoint)

    def _require_room(self, tenant: Tenant) -> None:
        stored = self.store.stored_bytes(tenant.name)
        quota = tenant.quotas.stored_bytes
        if stored >= quota:
            raise UserError(
                f"key {tenant.name} has {stored} bytes of checkpoints, at most {quota}: delete some, or set ttl_seconds"
            )

    @staticmethod
    def _saved_answer(checkpoint: Checkpoint) -> dict[str, Any]:
        if checkpoint.unnamed and checkpoint.sampler is not None:
            return {"path": None, "sampling_session_id": checkpoint.sampler}
        return {"path": checkpoint.path}

    # -- sampling

    def create_sampler(self, tenant: Tenant, body: SamplerBody) -> str:
        """A sampling session's id.

        Raises:
            UserError: for a path that is none, or of a merged model, or another base model.
            UnknownObject: when there is no such session or checkpoint of this key.
        """
        self.session(body.session_id, tenant)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if body.model_path is None:
            self._require_base(body.base_model or "")
        else:
            self._sampled(body.model_path, tenant)
        if sampler_id not in self.store.samplers:
            self.store.samplers.write(sampler_id, tenant=tenant.name, path=body.model_path)
        return sampler_id

    def sampler(self, tenant: Tenant, sampler_id: str) -> str | None:
        """The path of a sampling session's weights; None: the base model.

        Raises:
            UnknownObject: when there is none of this key.
        """
        record = self.store.samplers.get(sampler_id)
        if record is None or record["tenant"] != tenant.name:
            raise UnknownObject(
                f"there is no sampling session {sampler_id[:200]} of this key, or its unnamed weights are older than "
                f"the last {KEPT_SAMPLERS} of their run: create one"
            )
        path: str | None = record["path"]
        return path

    def sample(self, tenant: Tenant, body: SampleBody, content: bytes) -> dict[str, Any]:
        """Accept a request for samples; raises as `create_sampler`, or QuotaExceeded."""
        if body.sampling_session_id is not None:
            path = self.sampler(tenant, body.sampling_session_id)
            place = secrets.token_hex(8) if body.seq_id is None else str(body.seq_id)
            request_id = f"{body.sampling_session_id}:{place}"
        else:
            path = body.model_path
            request_id = f"sample:{secrets.token_hex(8)}"
            if path is None:
                self._require_base(body.base_model or "")
        checkpoint = None if path is None else self._sampled(path, tenant)
        future, is_new = self.futures.open(request_id, tenant, content)
        if is_new:
            try:
                self.samplers.add(self.samplers.job(body, future, checkpoint))
            except UserError as error:
                future.fail(str(error), by_user=True)
        sequences = [f"{request_id}:{sample}" for sample in range(body.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    def _sampled(self, path: str, tenant: Tenant) -> Checkpoint:
        checkpoint = self.store.find(path, tenant.name)
        if checkpoint.kind == "external_weights":
            raise UserError(f"a merged model is sampled by another server, got {path}: give weights of an adapter")
        return checkpoint

    def _require_base(self, name: str) -> None:
        if name != self.trainer.base_model:
            raise UserError(f"base_model must be {self.trainer.base_model}, got {name[:200]!r}: name that")

    # -- adapters from elsewhere

    async def import_adapter(self, tenant: Tenant, name: str, write: Callable[[Path], None]) -> str:
        """Store an adapter of peft as a checkpoint that a model can begin with.

        Args:
            tenant: the key that owns it.
            name: its name.
            write: makes its folder.

        Returns:
            its path.

        Raises:
            UserError: when it is no adapter of this base, or the key has too many checkpoints.
        """
        self._require_room(tenant)
        run_id = f"import-{secrets.token_hex(4)}"
        checkpoint = Checkpoint(run_id, "weights", checked_name(name), tenant.name, 0, 0, time.time(), 0)

        def save(folder: Path) -> None:
            write(folder)
            self.trainer.engine.load(run_id, folder)
            self.trainer.engine.remove(run_id)
            checkpoint.rank = stored_adapter(str(folder)).rank

        await self.on_engine(partial(self.store.write_checkpoint, checkpoint, save, overwrite=False))
        return checkpoint.path

    # -- the engine's thread

    async def on_engine(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """The result of a function that the engine's thread calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def work(self) -> None:
        """Feed the engine, until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _SWEEP_SECONDS)
            self._wake.clear()
            while True:
                runs = self._queue.next_runs()
                for queue, command in runs:
                    await self._run(self.models[queue.model_id], command)
                rows = self._queue.next_rows()
                if rows:
                    await self._compute(rows)
                if not runs and not rows:
                    break
            if time.monotonic() >= self._next_sweep:
                self._next_sweep = time.monotonic() + _SWEEP_SECONDS
                await self._sweep()

    def close(self) -> None:
        """End the engine's thread after what it does now."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, model: Model, command: Command) -> None:
        function = command.run
        assert function is not None
        creates = model.queue.next_seq == 0

        def run() -> Answer:
            if not model.ready and not creates:
                self._put_into_engine(model)
            return function()

        try:
            command.future.finish(await self.on_engine(run))
        except (UserError, UnknownObject) as error:
            command.future.fail(str(error), by_user=True)
        except CommandFailed as error:
            command.future.fail(str(error), by_user=False)
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            logger.error("%s of %s has failed", command.name, model.run.run_id, exc_info=error)
            command.future.fail(f"{command.name} has failed, the log of the server tells why", by_user=False)
        model.queue.end()
        if not model.ready:  # it was not made, or has been unloaded
            self._forget(model)

    async def _compute(self, rows: list[TakenRow]) -> None:
        """Compute a packed batch. If that fails, its commands are computed one by one, and those that fail alone are
        at fault."""
        groups: dict[Command, list[TakenRow]] = {}
        for row in rows:
            groups.setdefault(row.command, []).append(row)
        start = time.perf_counter()
        failure = await self._failure(rows)
        if failure is not None:
            for command, command_rows in groups.items():
                if len(groups) > 1:
                    failure = await self._failure(command_rows)
                if failure is not None:
                    self._break(self.models[command_rows[0].queue.model_id], command, failure)
        self.metrics.batch_seconds.observe(time.perf_counter() - start)
        self.metrics.batch_models.observe(len({row.queue.model_id for row in rows}))

    async def _failure(self, rows: list[TakenRow]) -> Exception | None:
        """Compute a packed batch; returns why that has failed."""
        try:
            await self._compute_together(rows)
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            commands = len({row.command for row in rows})
            logger.error("a packed batch of %d commands has failed", commands, exc_info=error)
            return error
        return None

    async def _compute_together(self, rows: list[TakenRow]) -> None:
        models = list(dict.fromkeys(self.models[row.queue.model_id] for row in rows))

        def compute() -> Any:
            for model in models:
                if not model.ready:
                    self._put_into_engine(model)
            return self.trainer.engine.forward_backward([row.row.row for row in rows])

        results = await self.on_engine(compute)
        for row, result in zip(rows, results, strict=True):
            model = self.models[row.queue.model_id]
            model.has_gradient |= row.row.learns
            command = row.command
            command.results.append((row.row, result))
            self.metrics.trained_tokens.labels(row.queue.tenant.name).inc(row.row.tokens)
            if len(command.results) == len(command.rows):
                command.future.finish(_forward_backward_answer(command.results))
                model.queue.end()

    def _break(self, model: Model, command: Command, error: Exception) -> None:
        """Fail a command whose rows cannot be computed; the step that their gradient is for is left out too."""
        expected = isinstance(error, (UserError, UnknownObject))
        text = str(error) if expected else f"{type(error).__name__}: the log of the server tells why"
        command.future.fail(f"forward_backward has failed: {text}", by_user=expected)
        if command.rows[0].learns:
            model.broken = text
        model.queue.end()

    async def _sweep(self) -> None:
        """Let models leave whose session has finished or was not seen for long, and delete expired checkpoints."""
        limit = time.monotonic() - self._session_seconds
        for model in list(self.models.values()):
            session = self.sessions.get(model.run.session_id)
            ended = session is None or session.finished or session.last_seen < limit
            # after its session has ended, nobody sends the commands that are missing before those that wait
            idle = model.queue.head is None if ended else not model.queue.waiting
            if (ended or model.leaving) and idle:
                if model.ready:
                    await self.on_engine(self.trainer.engine.remove, model.run.run_id)
                self._forget(model)
        await self.on_engine(self.store.expire)

    def _forget(self, model: Model) -> None:
        """Forget a model's state; commands that wait for it fail."""
        del self.models[model.run.run_id]
        del self._queue.models[model.run.run_id]
        for call in model.leaving:
            call()
        for command in model.queue.waiting.values():
            command.future.fail("the model has been unloaded, or was never made", by_user=True)

    def _models_of(self, tenant: Tenant) -> list[Model]:
        return [model for model in list(self.models.values()) if model.queue.tenant is tenant]


def _fail(error: Exception) -> Answer:
    raise error


def _forward_backward_answer(results: Any) -> Answer:
    """The answer of a command from its rows and their results."""
    logprobs = [result.logprobs.numpy() for _, result in results]
    total = sum(float(row.loss(result.logprobs)) if result.loss is None else result.loss for row, result in results)
    return forward_backward_output(logprobs, {"loss:sum": total})
