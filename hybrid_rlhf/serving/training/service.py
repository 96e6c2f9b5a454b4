"""Requests of clients: sessions, models and their commands, sampling sessions, samples.

Commands are accepted in any order and answered at once with the id of their result. A faulty command keeps its place in
the order, and fails when it is due. The methods with a body answer a route; `content` is the body's bytes. They raise
UserError for an invalid request, UnknownObject for an object that does not exist or belongs to another key, Gone for
one that no longer exists, and QuotaExceeded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.serving.training.base import LoadedBase
from hybrid_rlhf.serving.training.bodies import (
    CheckpointBody,
    CommandBody,
    CreateModelBody,
    LoadBody,
    ModelId,
    OptimStepBody,
    SampleBody,
    SamplerBody,
    SamplerId,
    SessionBody,
    SessionId,
    read_body,
)
from hybrid_rlhf.serving.training.futures import Answer, Futures, Gone
from hybrid_rlhf.serving.training.messages import read_forward_backward
from hybrid_rlhf.serving.training.metrics import TrainingMetrics
from hybrid_rlhf.serving.training.queue import BACKWARD, Command, CommandQueue, Model, Work
from hybrid_rlhf.serving.training.rows import packed_rows
from hybrid_rlhf.serving.training.sampling import Samplers
from hybrid_rlhf.serving.training.sessions import Sessions
from hybrid_rlhf.serving.training.states import ModelStates, saved_answer
from hybrid_rlhf.serving.training.store import (
    KEPT_SAMPLERS,
    Checkpoint,
    JsonObject,
    Run,
    Store,
    UnknownObject,
)
from hybrid_rlhf.serving.training.tenants import Tenant, Tenants
from hybrid_rlhf.serving.training.worker import EngineWorker

_ROW_BYTES = 4096
"""Memory of a waiting row in addition to its numbers: a short row takes a hundred times the bytes that are sent."""


class TrainingService:
    """The service of one base model. Used on the event loop, except for `create_session` and `create_sampler`."""

    def __init__(self, config: TrainServerConfig, base: LoadedBase, store: Store, tenants: Tenants) -> None:
        """Create the service.

        Args:
            config: the settings.
            base: the model that trains and samples.
            store: runs and checkpoints on disk.
            tenants: the keys.
        """
        self.base = base
        self.store = store
        self.tenants = tenants
        self.metrics = metrics = TrainingMetrics()
        self.samplers = Samplers(
            base, resident=config.max_resident_adapters, metrics=metrics, is_shared=len([*tenants]) > 1
        )
        self.futures = Futures()
        self.sessions = Sessions(store.sessions)
        queue = CommandQueue(base.batch_tokens, apart=config.deterministic)
        self.models = queue.models
        self.states = ModelStates(base, store, metrics)
        self.worker = EngineWorker(queue, self.states, self.sessions, session_seconds=config.session_minutes * 60)
        for tenant in tenants:
            metrics.follow(
                tenant.name,
                waiting_tokens=partial(queue.waiting_tokens, tenant),
                requests_in_flight=partial(getattr, tenant, "requests"),
                models=partial(queue.models_of, tenant),
                stored_bytes=partial(store.usage.bytes.__getitem__, tenant.name),
            )

    # -- sessions

    def create_session(self, tenant: Tenant, body: SessionBody, _: bytes) -> JsonObject:
        """Begin a session."""
        return {"session_id": self.sessions.create(tenant, body.user_metadata), "type": "create_session"}

    def heartbeat(self, tenant: Tenant, body: SessionId, _: bytes) -> JsonObject:
        """Record activity of a session."""
        self.sessions.find(body.session_id, tenant)
        return {"type": "session_heartbeat"}

    # -- models

    def create_model(self, tenant: Tenant, body: CreateModelBody, content: bytes) -> JsonObject:
        """Accept a new model."""
        self._require_base(body.base_model)
        lora = body.lora_config
        run = self._new_run(tenant, body.session_id, body.model_seq_id, body.user_metadata)
        run.rank = lora.rank
        run.targets = [kind for kind, trains in (("attn", lora.train_attn), ("mlp", lora.train_mlp)) if trains]
        run.seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
        return self._create(tenant, run, content, {"model_id": run.run_id, "type": "create_model"})

    def load(self, tenant: Tenant, body: LoadBody, content: bytes) -> JsonObject:
        """Accept a saved state, onto a model or as the beginning of a new one."""
        if body.model_id is not None:
            command = CommandBody(model_id=body.model_id, seq_id=body.seq_id)
            return self._submit(
                tenant, "load_weights", command, content, lambda model, _: self.states.load(model, body)
            )
        if body.session_id is None or body.model_seq_id is None:
            raise UserError("load_weights needs a model_id, or session_id and model_seq_id, got neither: send one")
        run = self._new_run(tenant, body.session_id, body.model_seq_id, body.user_metadata)
        run.initial_path = body.path
        run.initial_optimizer = body.optimizer
        return self._create(tenant, run, content, {"path": body.path, "model_id": run.run_id, "type": "load_weights"})

    def _new_run(self, tenant: Tenant, session_id: str, number: int, metadata: JsonObject | None) -> Run:
        self.sessions.find(session_id, tenant)
        run = Run(f"{session_id}:train:{number}", tenant.name, session_id, metadata=metadata or {})
        if run.run_id not in self.store.runs:
            self.store.require_run(run)
        return run

    def _create(self, tenant: Tenant, run: Run, content: bytes, answer: JsonObject) -> JsonObject:
        """Accept a new model; `answer` is its result, whose type is the command's name."""
        name = answer["type"]
        future, is_new = self.futures.open(f"{run.run_id}:0", tenant, name.encode() + content)
        if is_new and run.run_id in self.store.runs:  # it was made before a restart
            future.finish(answer)
        elif is_new:

            def write(*_: object) -> Answer:
                self.store.write_run(run)
                return answer

            self.worker.add(0, Command(Model(run, tenant, next_seq=0), name, future, write))
        return {"request_id": future.request_id, "model_id": run.run_id}

    def run(self, tenant: Tenant, model_id: str) -> Run:
        """The run of a model.

        Raises:
            UnknownObject: when the key has no such object.
        """
        model = self.models.get(model_id)
        run = self.store.runs.get(model_id) if model is None else model.run
        if run is None or run.tenant != tenant.name:
            raise UnknownObject(f"there is no model {model_id[:200]} of this key: create one")
        return run

    def info(self, tenant: Tenant, body: ModelId, _: bytes) -> JsonObject:
        """What a model is."""
        run = self.run(tenant, body.model_id)
        base = self.base.base_model
        data = {
            "arch": type(self.base.engine.lm).__name__,
            "model_name": base,
            "tokenizer_id": self.base.tokenizer_id,
        }
        return {
            "type": "get_info",
            "model_id": run.run_id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": run.rank,
            "model_name": base,
        }

    def unload(self, tenant: Tenant, body: ModelId, content: bytes) -> JsonObject:
        """Accept the end of a model, after its commands so far."""
        model_id = self.run(tenant, body.model_id).run_id
        request_id = f"{model_id}:unload:{secrets.token_hex(4)}"
        future, _ = self.futures.open(request_id, tenant, content)
        model = self.models.get(model_id)
        if model is None:
            future.finish({"model_id": model_id, "type": "unload_model"})
        else:
            model.leaving.append(future)
            self.worker.sweep_soon()
        return {"request_id": request_id, "model_id": model_id}

    # -- commands

    def forward_backward(self, tenant: Tenant, content: bytes) -> Callable[[], JsonObject]:
        """Read a forward pass, usually with a backward pass, on any thread; returns what accepts it on the event
        loop."""
        request = read_forward_backward(content)
        body = read_body({"model_id": request.model_id, "seq_id": request.seq_id or None}, CommandBody)
        work: Work
        row_bytes = 0
        try:
            work = packed_rows(request, self.base)
            row_bytes = _ROW_BYTES * len(work)
        except Exception as error:  # noqa: BLE001 - it fails in its place, or later ones would wait for ever
            work = partial(_raise, error)
        name = "forward" if request.forward_only else BACKWARD
        return partial(self._submit, tenant, name, body, content, work, more_bytes=row_bytes)

    def optim_step(self, tenant: Tenant, body: OptimStepBody, content: bytes) -> JsonObject:
        """Accept an update."""
        params = body.adam_params
        adam = AdamStep(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.grad_clip_norm,
        )
        return self._submit(tenant, "optim_step", body, content, lambda model, _: self.states.step(model, adam))

    def save(self, tenant: Tenant, body: CheckpointBody, content: bytes) -> JsonObject:
        """Accept a save."""
        return self._submit(tenant, body.command, body, content, lambda model, seq: self.states.save(model, body, seq))

    def reject(self, tenant: Tenant, body: CommandBody, name: str, content: bytes, error: UserError) -> JsonObject:
        """Accept a faulty command in its place: it fails when it is due, and later ones run."""
        return self._submit(tenant, name, body, content, partial(_raise, error))

    def _submit(
        self, tenant: Tenant, name: str, body: CommandBody, content: bytes, work: Work, *, more_bytes: int = 0
    ) -> JsonObject:
        """Accept a command, which takes `more_bytes` of memory in addition to its content."""
        run = self.run(tenant, body.model_id)
        run.last_request = time.time()
        self.sessions.see(run.session_id, tenant)
        known = self.models.get(run.run_id)
        # if it is not known, its state is read from its run's saved one before this command
        model = known or Model(run, tenant, next_seq=run.saved_seq + 1)
        seq = model.last_seq + 1 if body.seq_id is None else body.seq_id
        if known is None and (body.seq_id is None or seq > model.next_seq):  # updates may be missing
            raise Gone(
                f"{run.run_id} has left the server, which was stopped or had no request for long, and its "
                f"updates after {run.saved_path or 'its beginning'} are lost: create a training client from that state"
            )
        request_id = f"{run.run_id}:{seq}"
        fills_gap = seq == model.next_seq and bool(model.waiting)
        future, is_new = self.futures.open(
            request_id, tenant, name.encode() + content, more_bytes=more_bytes, is_awaited=fills_gap
        )
        if is_new and seq < model.next_seq:  # it ended before, and its result was forgotten
            saved = self.store.of_command(run.run_id, seq)
            if saved is None:
                future.fail("the result of this request was forgotten", by_user=False)
            else:
                future.finish({**saved_answer(saved), "type": name})
        elif is_new:
            command = partial(Command, model, name, future)
            self.worker.add(seq, command(work) if callable(work) else command(rows=work))
        return {"request_id": request_id, "model_id": run.run_id}

    # -- sampling

    def create_sampler(self, tenant: Tenant, body: SamplerBody, _: bytes) -> JsonObject:
        """Begin a sampling session."""
        self.sessions.find(body.session_id, tenant)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if body.model_path is None:
            self._require_base(body.base_model or "")
        else:
            self._sampled(body.model_path, tenant)
        self.store.write_sampler(sampler_id, tenant.name, body.model_path)
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    def join_sampler(self, tenant: Tenant, body: SamplerId, _: bytes) -> JsonObject:
        """Give another process of a client numbers for its requests."""
        self.sampler(tenant, body.sampling_session_id)
        return {"client_counter": 1 + secrets.randbelow(10**9), "type": "join_sampling_session"}

    def sampler(self, tenant: Tenant, sampler_id: str) -> str | None:
        """The path of a sampling session's weights; None: the base model.

        Raises:
            UnknownObject: when the key has no such object.
        """
        record = self.store.samplers.get(sampler_id)
        if record is None or record["tenant"] != tenant.name:
            raise UnknownObject(
                f"there is no sampling session {sampler_id[:200]} of this key, or its unnamed weights are older than "
                f"the last {KEPT_SAMPLERS} of their run: create one"
            )
        self.sessions.see(sampler_id.partition(":")[0], tenant)
        path: str | None = record["path"]
        return path

    def sample(self, tenant: Tenant, body: SampleBody, content: bytes) -> JsonObject:
        """Accept a request for samples."""
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
                self.samplers.add(body, future, checkpoint)
            except Exception as error:  # noqa: BLE001 - reported to the client, which may wait for it already
                future.fail_with(error, "sampling")
        sequences = [f"{request_id}:{sample}" for sample in range(body.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    def _sampled(self, path: str, tenant: Tenant) -> Checkpoint:
        checkpoint = self.store.find(path, tenant.name)
        if checkpoint.kind == "external_weights":
            raise UserError(f"a merged model is sampled by another server, got {path}: give weights of an adapter")
        return checkpoint

    def _require_base(self, name: str) -> None:
        if name != self.base.base_model:
            raise UserError(f"base_model must be {self.base.base_model}, got {name[:200]!r}: name that")


def _raise(error: Exception, *_: object) -> Answer:
    raise error
