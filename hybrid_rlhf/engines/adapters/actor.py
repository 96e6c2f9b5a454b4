"""The actor of a run whose base other runs share: in place of a HybridEngine, with the same checkpoints and folders."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.engines.adapters.base import Backward, Forward, Sampling, SharedBase
from hybrid_rlhf.engines.adapters.engine import AdapterRow
from hybrid_rlhf.engines.builder import EngineSpec, learning_rate
from hybrid_rlhf.engines.engine import EngineFacts, Role, UpdateStats
from hybrid_rlhf.engines.learning_rates import lr_factor
from hybrid_rlhf.engines.operations import TRAINED, Operations, training_operations
from hybrid_rlhf.engines.partition import base_parameters, full_tensors
from hybrid_rlhf.engines.sampling_engine import groups_of
from hybrid_rlhf.engines.weight_check import logprob_limit
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.masking import position_ids
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine, default_stop_token_ids
from hybrid_rlhf.models.policy import scatter_tokens
from hybrid_rlhf.runtime.world import World


class AdapterActor:
    """Computes and samples with an adapter of a shared base, together with the other runs."""

    role: Role = "actor"
    tensor_parallel = 1
    reports_rows = True
    packs = True
    rounds_otherwise = False
    samples_while_training = False
    router_agreement = None
    weight_sync_seconds = 0.0
    weight_check_seconds = 0.0

    def __init__(
        self,
        base: SharedBase,
        name: str,
        spec: EngineSpec,
        world: World,
        *,
        rollout: RolloutConfig,
        max_logprob_diff: float | None,
    ) -> None:
        """Add the adapter to the base.

        Args:
            base: the base of all runs.
            name: of the run.
            spec: the actor, with its adapter and optimizer.
            world: the rank.
            rollout: settings of generation.
            max_logprob_diff: faults.max_logprob_diff of the config.

        Raises:
            UserError: as in `SharedBase.add`.
        """
        assert spec.lora is not None and spec.optimizer is not None
        base.add(name, spec.lora, path=spec.path, model=spec.model, rollout=rollout, seed=spec.seed, world=world)
        self.world = world
        self.generation_world = world.split(1)
        self.groups = groups_of(world, self.generation_world)
        self.device = world.device
        self.work = DecodeWork()
        self.name = name
        self.engine = base.engine
        self.lm = base.engine.lm
        self.max_logprob_diff = logprob_limit(max_logprob_diff, self.lm.dtype)
        self._base = base
        self._optimizer = spec.optimizer
        self._total_updates = spec.total_updates
        self._peak_lr = learning_rate(spec, self.lm, spec.optimizer, is_main=world.is_main)
        self.skipped = 0
        """Number of skipped updates."""
        self._adapted = True
        self._outputs: list[Tensor] = []
        """Log-probs and entropies [2, T] of the rows of the last forward pass with gradient."""

    @functools.cached_property
    def operations(self) -> Operations:
        """What training its adapter computes."""
        base = training_operations(self.lm)
        return base._replace(token=base.token + TRAINED * self.engine.adapter(self.name).size)

    @property
    def facts(self) -> EngineFacts:
        """Properties of the model."""
        weights = {name: tuple(weight.shape) for name, weight in base_parameters(self.lm)}
        settings = self.lm.generation_config
        eos = None if settings is None else settings.eos_token_id
        return EngineFacts(self.packs, self.operations, eos, weights, self.max_logprob_diff, self.rounds_otherwise)

    @property
    def weight_version(self) -> int:
        """Number of optimizer updates, including skipped ones."""
        return self.engine.steps(self.name) + self.skipped

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_mask: Tensor,
        temperature: float = 1.0,
        *,
        routes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B, T] of the tokens of a mask; see `models.policy.Policy`. There are no routes."""
        real = attention_mask.bool()
        rows = []
        for ids, of_row, mask in zip(input_ids.cpu(), real.cpu(), token_mask.bool().cpu(), strict=True):
            tokens = ids[of_row]
            if len(tokens) > 1:
                rows.append(AdapterRow(self.name, tokens[:-1], tokens[1:], None, mask[of_row][1:], temperature))
        learns = torch.is_grad_enabled()
        kind = f"a forward pass, learns {learns}, adapted {self._adapted}"
        outputs = self._base.rendezvous.wait(Forward(rows, learns, self._adapted), kind)
        if learns:
            self._outputs = outputs = [output.requires_grad_() for output in outputs]
        predicted = real & (position_ids(real) > 0)
        no_tokens = torch.empty(2, 0, device=self.device)  # all that a rank without a share of the rows has
        logprobs, entropy = torch.cat([no_tokens, *outputs], dim=1)
        return scatter_tokens(logprobs, predicted), scatter_tokens(entropy, predicted)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Self]:
        """Use this actor as its own reference: the base model without the adapter."""
        self._adapted = False
        try:
            yield self
        finally:
            self._adapted = True

    def with_router_losses(self, loss: LossSum, weights: Tensor) -> LossSum:
        """Return the loss: a shared base has no router losses."""
        return loss

    def backward(self, total: Tensor, *, count: float) -> None:
        """Add the gradient of total / count; `total` is computed from the last forward pass."""
        outputs = self._outputs
        self._outputs = []
        gradients = torch.autograd.grad(total / max(count, 1.0), outputs) if outputs else ()
        self._base.rendezvous.wait(Backward(list(gradients)), "a backward pass")

    def step(self) -> UpdateStats:
        """Apply the accumulated gradient, and clear it."""
        config = self._optimizer
        updates = self.engine.steps(self.name)  # a skipped update does not advance the schedule
        lr = self._peak_lr * lr_factor(updates, config=config, total_steps=self._total_updates)
        adam = AdamStep(
            lr=lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
        stats = self.engine.step(self.name, adam)
        self.skipped += int(stats["skipped"])
        return UpdateStats(lr, stats["grad_norm"], bool(stats["skipped"]))

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine]:
        """Return a context in which the current weights generate, in one batch with the other runs.

        Args:
            stop_token_ids: tokens that end every completion; none: the model's own EOS tokens.
            tokenizer: for stop strings.
        """
        generation = GenerationEngine(
            self._base.backend,
            stop_token_ids=default_stop_token_ids(self.lm) if stop_token_ids is None else stop_token_ids,
            tokenizer=tokenizer,
            weight_version=self.weight_version,
            keeps_backend=True,
            run=lambda requests: self._base.rendezvous.wait(Sampling(requests, self.weight_version), "a rollout"),
        )
        try:
            yield generation
        finally:
            self.work = generation.work
            generation.close()

    def snapshot(
        self, *, stop_token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> GenerationEngine:
        """Raise RuntimeError: runs on a shared base sample between updates."""
        raise RuntimeError("runs on a shared base sample between updates: leave out rollout.async_sampling")

    def other_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context in which nothing changes: the actor has no averaged weights."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Remove the adapter from the base."""
        self._base.remove(self.name)

    # -- what is saved

    def full_tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """The weights with the adapter merged, one by one; see `engines.partition.full_tensors`."""
        changes = self.engine.factors(self.name)
        for name, weight in full_tensors(self.lm, self.world):
            change = changes.get(name)
            yield name, weight if weight is None or change is None else change.merged(weight)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as a PEFT folder."""
        self.engine.save(self.name, folder)
