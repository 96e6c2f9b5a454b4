"""Effects of commands on the state of a model, in the engine and on disk."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.models.lora import linear_layers
from hybrid_rlhf.models.pretrained.adapters import stored_adapter
from hybrid_rlhf.serving.training.base import LoadedBase
from hybrid_rlhf.serving.training.bodies import CheckpointBody, LoadBody, SaveBody, SaveForSamplerBody
from hybrid_rlhf.serving.training.futures import Answer
from hybrid_rlhf.serving.training.metrics import TrainingMetrics
from hybrid_rlhf.serving.training.queue import Model
from hybrid_rlhf.serving.training.store import Checkpoint, Run, Store, checked_name, folder_named
from hybrid_rlhf.serving.training.tenants import Tenant

LORA_ALPHA = 32.0
"""Scale of every adapter, times its rank: the client has no key for it."""


class ModelStates:
    """The states of all models. Used on the engine's thread only."""

    def __init__(self, base: LoadedBase, store: Store, metrics: TrainingMetrics) -> None:
        """Set the engine, the disk, and the metrics that count steps."""
        self.engine = base.engine
        self.store = store
        self._tokenizer = base.tokenizer
        self.metrics = metrics

    def bring_in(self, model: Model) -> None:
        """Load the state of a model into the engine: its newest saved one, or its initial one.

        Raises:
            UserError: when the run begins with a checkpoint that is not an adapter.
            UnknownObject: when its checkpoint no longer exists.
        """
        run = model.run
        if run.saved_path is not None:
            self._load(run, run.saved_path, with_optimizer=True)
        elif run.initial_path is not None:
            run.rank = self._load(run, run.initial_path, with_optimizer=run.initial_optimizer).rank
        else:
            lora = LoraConfig(rank=run.rank, alpha=LORA_ALPHA, target_modules=self._target_modules(run.targets))
            self.engine.add(run.run_id, lora, seed=run.seed)
        model.ready = True

    def _load(self, run: Run, path: str, *, with_optimizer: bool) -> Checkpoint:
        """Read the adapter of a run from a checkpoint; returns that."""
        checkpoint = self.store.find(path, run.tenant)
        if checkpoint.kind == "external_weights":
            raise UserError(f"a merged model is no adapter, got {path}: give one of save_weights")
        with folder_named(checkpoint.folder, path):
            self.engine.load(run.run_id, checkpoint.folder, with_optimizer=with_optimizer)
        return checkpoint

    def _target_modules(self, kinds: list[str]) -> str | list[str]:
        if len(kinds) == 2:
            return "all-linear"
        if not kinds:
            raise UserError(
                "an adapter needs attention or MLP layers, as the head has none: set train_attn or train_mlp"
            )
        lm = self.engine.lm
        names = linear_layers(lm, lm.get_output_embeddings())
        return [name for name in names if ("attn" in name or "attention" in name) == (kinds == ["attn"])]

    def step(self, model: Model, adam: AdamStep) -> Answer:
        """Update a model with its gradient.

        Raises:
            CommandFailed: when a backward pass has failed; the gradient is discarded.
            UserError: when a backward pass was refused, likewise; when there is no gradient.
        """
        broken = model.broken
        if broken is not None or not model.has_gradient:
            self.engine.zero_gradient(model.run.run_id)
            model.has_gradient = False
            model.broken = None
            if broken is not None:
                raise type(broken)(f"a backward pass of this step has failed, and the step is left out: {broken}")
            raise UserError("optim_step needs a forward_backward since the last one, got none: send one first")
        model.saved = False  # also if the step fails half way
        stats = self.engine.step(model.run.run_id, adam)
        model.has_gradient = False
        self.metrics.steps.labels(model.run.tenant).inc()
        # a step would replace the client's own; a norm that is not finite is no number of JSON, and `skipped` tells it
        metrics = {key: stats[key] for key in ("grad_norm", "skipped") if math.isfinite(stats[key])}
        return {"metrics": metrics, "type": "optim_step"}

    def load(self, model: Model, body: LoadBody) -> Answer:
        """Replace a model by a saved state; raises as `bring_in`."""
        run = model.run
        self._load(run, body.path, with_optimizer=body.optimizer)
        model.has_gradient = False
        model.broken = None
        model.saved = False
        return {"path": body.path, "model_id": run.run_id, "type": "load_weights"}

    def save(self, model: Model, body: CheckpointBody, seq: int) -> Answer:
        """Write a checkpoint of a model; `seq`: of the command.

        Raises:
            UserError: for an invalid or used name, a sampling session with other weights, or when the key exceeds its
                quota.
        """
        run = model.run
        kind = body.kind
        sampler = body.sampling_session_seq_id if isinstance(body, SaveForSamplerBody) else None
        checkpoint = Checkpoint(
            run.run_id,
            kind,
            checked_name(body.path) if body.path is not None else f"command-{seq}",
            run.tenant,
            run.rank,
            seq,
            expires=None if body.ttl_seconds is None else time.time() + body.ttl_seconds,
            unnamed=kind == "sampler_weights" and body.path is None,
            sampler=None if sampler is None else f"{run.session_id}:sample:{sampler}",
            metadata=body.user_metadata or {},
        )

        def write(folder: Path) -> None:
            if kind == "external_weights":
                self._write_merged(run.run_id, folder)
            else:
                self.engine.save(run.run_id, folder, with_optimizer=kind == "weights")

        if checkpoint.sampler is not None:
            self.store.write_sampler(checkpoint.sampler, run.tenant, checkpoint.path)
        self.store.write_checkpoint(checkpoint, write, overwrite=isinstance(body, SaveBody) and body.overwrite)
        if not model.has_gradient and model.broken is None:  # a gradient is not saved
            if kind == "weights":
                model.saved = True
                run.saved_path = checkpoint.path
            if model.saved:
                run.saved_seq = seq
                self.store.write_run(run)
        return {**saved_answer(checkpoint), "type": body.command}

    def _write_merged(self, run_id: str, folder: Path) -> None:
        """Write the base with an adapter merged into its weights, as a Hugging Face folder."""
        lm = self.engine.lm
        weights = lm.state_dict()
        for name, change in self.engine.factors(run_id).items():
            weights[name] = change.merged(weights[name])
        lm.save_pretrained(folder, state_dict=weights)
        self._tokenizer.save_pretrained(folder)

    def import_adapter(self, tenant: Tenant, name: str, files: Mapping[str, bytes]) -> str:
        """Store an adapter of peft as a checkpoint that a model can begin with.

        Args:
            tenant: the key that owns it.
            name: its name.
            files: contents of the files of its folder.

        Returns:
            its path.

        Raises:
            UserError: when it is not an adapter of this base, or the key exceeds its quota.
        """
        checkpoint = Checkpoint(f"import-{secrets.token_hex(4)}", "weights", checked_name(name), tenant.name, 0, 0)

        def save(folder: Path) -> None:
            folder.mkdir()
            for file, content in files.items():
                (folder / file).write_bytes(content)
            with folder_named(folder, name):
                self.engine.load(checkpoint.run_id, folder)
                self.engine.remove(checkpoint.run_id)
                checkpoint.rank = stored_adapter(str(folder)).rank

        self.store.write_checkpoint(checkpoint, save, overwrite=False)
        return checkpoint.path


def saved_answer(checkpoint: Checkpoint) -> dict[str, str | None]:
    """The part of a command's answer that names the checkpoint it wrote."""
    if checkpoint.unnamed and checkpoint.sampler is not None:
        return {"path": None, "sampling_session_id": checkpoint.sampler}
    return {"path": checkpoint.path}
