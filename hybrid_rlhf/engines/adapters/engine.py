"""The operations on many adapters of one base: add, forward and backward, step, save, park.

Every method is called by all ranks, with the same arguments. Rows are dealt over the ranks, and a step sums the
gradient of its adapter over them. Adapters are replicated.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rules import nearest_hint, require
from hybrid_rlhf.configs.sections.training import AdamStep, MicroBatches
from hybrid_rlhf.data.loaders import shard_batch
from hybrid_rlhf.engines.adapters.adapter import Adapter, LinearLayer
from hybrid_rlhf.engines.adapters.files import ParkedTensors, read_optimizer, read_state, write_folder
from hybrid_rlhf.engines.adapters.products import AdapterProducts, StackedFactors
from hybrid_rlhf.functional.transfers import moved
from hybrid_rlhf.models.lora import linear_layers, modules_selected, require_plain
from hybrid_rlhf.models.packing import pack_parts, pads
from hybrid_rlhf.models.policy import HeadLogprobs
from hybrid_rlhf.models.pretrained.adapters import LowRank, stored_adapter
from hybrid_rlhf.models.pretrained.loading import load_model, position_limit, training_dtype
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.structure import backbone_of
from hybrid_rlhf.runtime.world import World

RowLoss = Callable[[Tensor], Tensor]
"""Maps log-probs [T] float32 to the sum of a row's losses."""


@dataclass(frozen=True)
class AdapterRow:
    """A row of one adapter."""

    adapter: str
    tokens: Tensor
    """[T] int64."""
    targets: Tensor
    """[T] int64; log-prob t is that of targets[t] after tokens[: t + 1]."""
    loss: RowLoss | None = None
    """None: no gradient. It may be called on any rank."""
    mask: Tensor | None = None
    """[T] bool, true for the log-probs that are computed, the others are 0; None: all."""
    temperature: float = 1.0
    """Divisor of the logits."""


@dataclass(frozen=True)
class RowResult:
    """Log-probs and loss of a row."""

    logprobs: Tensor
    """[T] float32, in host memory."""
    loss: float | None


class AdapterEngine:
    """One frozen base model and many LoRA adapters, each with its own rank, layers, optimizer and number of steps."""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        world: World,
        micro_batch_tokens: int = 8192,
        deterministic: bool = False,
        park_folder: Path | None = None,
        max_resident: int | None = None,
    ) -> None:
        """Freeze a model, which is on the device of the rank.

        Args:
            lm: causal LM with packed rows.
            world: ranks that train together.
            micro_batch_tokens: tokens per forward pass and rank.
            deterministic: compute the rows of each adapter apart, so that its results are bit for bit those of training
                alone.
            park_folder: folder of parked adapters; None: host memory.
            max_resident: number of adapters that stay on the device; after each call those that were used least
                recently are parked. None: all stay.

        Raises:
            UserError: for a model without packed rows, or with adapters already.
        """
        require_plain(lm)
        if pads(lm):
            raise UserError(
                f"several adapters train in packed rows, {type(lm).__name__} computes padding: train each with its own "
                "run (lora)"
            )
        lm.requires_grad_(False)
        self.lm = lm
        self.world = world
        self._micro_batches = MicroBatches(tokens=micro_batch_tokens)
        self._deterministic = deterministic
        self._park_folder = None if park_folder is None else park_folder / f"rank_{world.rank:05}"
        self._max_resident = max_resident
        self._head = HeadLogprobs(lm)
        modules = {name: lm.get_submodule(name) for name in linear_layers(lm, lm.get_output_embeddings())}
        self._layers = {name: _linear_layer(name, module) for name, module in modules.items()}
        self._transposed = any(isinstance(module, Conv1D) for module in modules.values())
        self._products = AdapterProducts(modules)
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        """Adapters by name, the one that was used last at the end."""
        self._parked: dict[str, ParkedTensors] = {}

    @classmethod
    def from_pretrained(cls, path: str, *, world: World, model: ModelConfig | None = None, **options: Any) -> Self:
        """Load the base.

        Args:
            path: folder, hub name or .gguf file.
            world: ranks that train together.
            model: dtype, kernels and gradient checkpointing of the base.
            options: keywords of the constructor.

        Raises:
            UserError: when it cannot be loaded, or has no packed rows, or its weights would be quantised.
        """
        config = model or ModelConfig()
        require(
            config.quantization is None,
            f"several adapters train on weights in the model's dtype, got model.quantization {config.quantization}: "
            "leave it out",
        )
        resolved = resolve_model(path, world=world)
        lm, _ = load_model(resolved, "causal_lm", config=config, dtype=training_dtype(config, world.device))
        lm.to(world.device)  # type: ignore[arg-type]
        lm.train(config.gradient_checkpointing)  # dropout is 0 in any case
        return cls(lm, world=world, **options)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._adapters)

    @property
    def parked(self) -> tuple[str, ...]:
        """Names of the parked adapters."""
        return tuple(self._parked)

    def add(self, name: str, lora: LoraConfig, *, seed: int) -> None:
        """Add a new adapter, which changes nothing before its first step.

        Args:
            name: its name.
            lora: rank, alpha and layers.
            seed: seed of its first factors.

        Raises:
            UserError: when the name is taken, or the layers do not exist.
        """
        if name in self._adapters:
            raise UserError(f"an adapter must have a new name, {name} exists: choose another, or remove it first")
        adapter = self._new(self._targets(lora.target_modules), rank=lora.rank, alpha=lora.alpha)
        adapter.initialise(seed)
        self._adapters[name] = adapter
        self._park_oldest()

    def load(self, name: str, folder: Path, *, with_optimizer: bool = False) -> None:
        """Read an adapter from a PEFT folder; one of this name is replaced.

        Args:
            name: its name.
            folder: a folder of `save`, or of peft.
            with_optimizer: also read the optimizer's state; false: the optimizer begins anew.

        Raises:
            UserError: when the folder has no adapter of this base, or no state of an optimizer.
        """
        stored = stored_adapter(str(folder))
        names = {factor.removesuffix(".weight").rpartition(".")[0] for factor in stored.factors}
        unknown = sorted(names - self._layers.keys())
        if unknown or not names:
            raise UserError(
                f"an adapter must change linear layers of {type(self.lm).__name__}, {folder} changes "
                f"{unknown[0] if unknown else 'nothing'}: give the model that it was trained on"
            )
        layers = [layer for layer in self._layers.values() if layer.name in names]
        adapter = self._new(layers, rank=stored.rank, alpha=stored.alpha)
        read_state(adapter, "weights", stored.factors, folder)
        if with_optimizer:
            read_optimizer(adapter, folder)
        if name in self._adapters:
            self.remove(name)
        self._adapters[name] = adapter
        self._park_oldest()

    def save(self, name: str, folder: Path, *, with_optimizer: bool = False) -> None:
        """Write an adapter as a PEFT folder, on the main rank; it appears once complete.

        Args:
            name: its name.
            folder: folder to write, in an existing one; replaced if it exists.
            with_optimizer: also write the optimizer's state. A gradient that was not used yet is not written.

        Raises:
            UserError: when there is no such adapter.
        """
        adapter = self._resident(name)
        if self.world.is_main:
            write_folder(
                folder,
                adapter,
                base=self.lm.name_or_path,
                targets=self._target_names(adapter),
                transposed=self._transposed,
                with_optimizer=with_optimizer,
            )
        self._park_oldest()
        self.world.barrier()

    def remove(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            UserError: when there is no such adapter.
        """
        self._known(name)
        del self._adapters[name]
        if (parked := self._parked.pop(name, None)) is not None:
            parked.discard()

    def forward_backward(self, rows: Sequence[AdapterRow]) -> list[RowResult]:
        """Compute the rows in packed batches, and add the gradient of each row's loss to that of its adapter.

        Args:
            rows: rows of any adapters. If none has a loss, no gradient is computed.

        Raises:
            UserError: for an unknown adapter, or a row that the model cannot compute.
            Exception: that of a loss, on the rank that called it; RuntimeError on the others. All gradients are then as
                before the call.
        """
        self._check(rows)
        names = list(dict.fromkeys(row.adapter for row in rows))
        batches = [[name] for name in names] if self._deterministic else [names] if names else []
        learning = {row.adapter for row in rows if row.loss is not None}
        results: dict[int, RowResult] = {}
        computed = []
        for batch in batches:
            numbers = [number for number, row in enumerate(rows) if row.adapter in batch]
            adapters = [self._resident(name) for name in batch]
            stacked = StackedFactors(adapters, self.world.device)
            with torch.set_grad_enabled(not learning.isdisjoint(batch)):
                results |= self._computed(rows, numbers, adapters, batch, stacked)
            computed.append((batch, adapters, stacked))
        for batch, adapters, stacked in computed:  # not before all are computed
            stacked.add_gradients(adapters, [name in learning for name in batch])
        self._park_oldest()
        return [results[number] for number in range(len(rows))]

    def step(self, name: str, adam: AdamStep) -> dict[str, float]:
        """Update an adapter with its gradient, summed over the ranks; without a gradient, with zeros.

        Returns:
            grad_norm: norm before clipping; step: number of updates so far; skipped: 1 if the gradient is not finite,
            and the update was skipped.

        Raises:
            UserError: when there is no such adapter.
        """
        adapter = self._resident(name)
        self.world.all_reduce(adapter.flat("gradient"))
        stats = adapter.step(adam)
        self._park_oldest()
        return stats

    def zero_gradient(self, name: str) -> None:
        """Remove the gradient of an adapter.

        Raises:
            UserError: when there is no such adapter.
        """
        self._resident(name).zero_gradient()

    def steps(self, name: str) -> int:
        """Number of updates of an adapter.

        Raises:
            UserError: when there is no such adapter.
        """
        return self._known(name).steps

    def park(self, name: str) -> None:
        """Move an adapter from the device to the park folder or host memory; it comes back when it is used.

        Raises:
            UserError: when there is no such adapter.
        """
        adapter = self._known(name)
        if name not in self._parked:
            self._parked[name] = ParkedTensors(name, adapter.tensors, self._park_folder)
            adapter.release()

    def factors(self, name: str) -> dict[str, LowRank]:
        """Copies of an adapter's current factors by the names of the weights, for a generation engine.

        Raises:
            UserError: when there is no such adapter.
        """
        adapter = self._resident(name)
        parts = adapter.parts("weights")
        return {
            f"{layer.name}.weight": LowRank(up.t() * adapter.scale, down.clone(), self._transposed)
            for layer, down, up in zip(adapter.layers, parts[::2], parts[1::2], strict=True)
        }

    # -- a packed batch

    def _computed(
        self,
        rows: Sequence[AdapterRow],
        numbers: Sequence[int],
        adapters: Sequence[Adapter],
        names: Sequence[str],
        stacked: StackedFactors,
    ) -> dict[int, RowResult]:
        """Results of the rows with these numbers, which are of these adapters; their gradients are in `stacked`."""
        results: dict[int, RowResult] = {}
        failure = None
        try:
            for micro_batch in shard_batch(
                numbers,
                [len(rows[number].tokens) for number in numbers],
                rank=self.world.rank,
                ranks=self.world.size,
                micro_batches=self._micro_batches,
            ):
                chosen = [number for number in micro_batch if number is not None]
                chosen.sort(key=lambda number: -len(rows[number].tokens))
                by_adapter = [[number for number in chosen if rows[number].adapter == name] for name in names]
                if chosen:
                    results |= self._micro_batch(rows, by_adapter, adapters, stacked)
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks, which would wait for this one
            failure = error
        of_ranks = self.world.all_gather_objects((results, None if failure is None else repr(failure)))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(of_ranks):
            if text is not None:
                raise RuntimeError(f"rank {rank} failed in forward_backward: {text}")
        return {number: result for of_rank, _ in of_ranks for number, result in of_rank.items()}

    def _micro_batch(
        self,
        rows: Sequence[AdapterRow],
        by_adapter: Sequence[Sequence[int]],
        adapters: Sequence[Adapter],
        stacked: StackedFactors,
    ) -> dict[int, RowResult]:
        """Forward and backward of rows, whose numbers are given by adapter."""
        order = [number for numbers in by_adapter for number in numbers]
        chosen = [rows[number] for number in order]
        device = self.world.device
        lengths = [len(row.tokens) for row in chosen]
        input_ids = pad_sequence([row.tokens.cpu() for row in chosen], batch_first=True)
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        parts = [len(numbers) for numbers in by_adapter]
        arguments = moved(pack_parts(self.lm, input_ids, real, parts, device=device), device)
        tokens = [sum(len(rows[number].tokens) for number in numbers) for numbers in by_adapter]
        results = {}
        losses = []
        with self._products.of(stacked, [adapter.scale for adapter in adapters], tokens):
            hidden = backbone_of(self.lm)(**arguments, use_cache=False).last_hidden_state[0]
            of_rows = self._logprobs(hidden, chosen).split(lengths)
            for number, row, logprobs in zip(order, chosen, of_rows, strict=True):
                loss = None if row.loss is None else row.loss(logprobs)
                losses += [] if loss is None else [loss]
                results[number] = RowResult(logprobs.detach().cpu(), None if loss is None else float(loss.detach()))
            if losses:
                torch.stack(losses).sum().backward()
        return results

    def _logprobs(self, hidden: Tensor, rows: Sequence[AdapterRow]) -> Tensor:
        """Log-probs [T of all rows] of the targets, 0 where a mask is 0."""
        device = hidden.device
        targets = torch.cat([row.targets for row in rows]).to(device)
        masks = [torch.ones(len(row.tokens)) if row.mask is None else row.mask.cpu() for row in rows]
        wanted = torch.cat([mask.bool() for mask in masks])
        lengths = torch.tensor([len(row.tokens) for row in rows])
        temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float64).repeat_interleave(lengths)
        logprobs = hidden.new_zeros(len(targets), dtype=torch.float32)
        for temperature in dict.fromkeys(row.temperature for row in rows):
            places = (wanted & (temperatures == temperature)).nonzero().squeeze(1).to(device)
            logprobs = logprobs.index_copy(0, places, self._head(hidden[places], targets[places], temperature)[0])
        return logprobs

    def _check(self, rows: Sequence[AdapterRow]) -> None:
        vocabulary = self.lm.get_input_embeddings().num_embeddings
        longest = position_limit(self.lm)
        for number, row in enumerate(rows):
            self._known(row.adapter)
            shapes = {tuple(x.shape) for x in (row.tokens, row.targets, row.mask) if x is not None}
            if len(shapes) > 1 or row.tokens.dim() != 1 or not len(row.tokens):
                raise UserError(
                    f"tokens, targets and mask of a row have one length, at least 1, row {number} has "
                    f"{sorted(shapes)}: give as many of each"
                )
            for ids in (row.tokens, row.targets):
                least = int(ids.min())
                most = int(ids.max())
                if least < 0 or most >= vocabulary:
                    raise UserError(
                        f"token ids must be in 0..{vocabulary - 1}, row {number} has {least}..{most}: use the model's "
                        "tokenizer"
                    )
            if longest is not None and len(row.tokens) > longest:
                raise UserError(
                    f"a row must have at most {longest} tokens, for which {type(self.lm).__name__} has positions, row "
                    f"{number} has {len(row.tokens)}: shorten it"
                )

    # -- the adapters

    def _new(self, layers: Sequence[LinearLayer], *, rank: int, alpha: float) -> Adapter:
        return Adapter(layers, rank=rank, alpha=alpha, device=self.world.device)

    def _known(self, name: str) -> Adapter:
        if name not in self._adapters:
            hint = nearest_hint(name, self._adapters, otherwise="add it first")
            raise UserError(f"an adapter must have been added, got {name}: {hint}")
        return self._adapters[name]

    def _resident(self, name: str) -> Adapter:
        """An adapter, on the device."""
        adapter = self._known(name)
        if name in self._parked:
            adapter.give(self._parked[name].read())
            self._parked.pop(name).discard()
        self._adapters.move_to_end(name)
        return adapter

    def _park_oldest(self) -> None:
        """Park the adapters beyond `max_resident` that were used least recently."""
        resident = [name for name in self._adapters if name not in self._parked]
        if self._max_resident is not None:
            for name in resident[: max(0, len(resident) - self._max_resident)]:
                self.park(name)

    def _targets(self, target_modules: str | list[str]) -> list[LinearLayer]:
        """The layers that names select: as in peft, whole names or their last parts; a text is a regular expression,
        except all-linear."""
        if target_modules == "all-linear":
            return list(self._layers.values())
        matches = modules_selected(self.lm, target_modules)
        chosen = set[str]().union(*matches.values())
        unmatched = [target for target, names in matches.items() if not names]
        if unmatched or not chosen <= self._layers.keys():
            faulty = unmatched[0] if unmatched else min(chosen - self._layers.keys())
            known = ", ".join(sorted({name.rpartition(".")[2] for name in self._layers}))
            raise UserError(
                f"lora.target_modules must name linear layers of {type(self.lm).__name__} except the head, got "
                f"{faulty}: name some of {known}"
            )
        return [layer for name, layer in self._layers.items() if name in chosen]

    def _target_names(self, adapter: Adapter) -> list[str]:
        """target_modules for peft: the last parts of the names, or whole names where the parts select other layers."""
        names = {layer.name for layer in adapter.layers}
        parts = {name.rpartition(".")[2] for name in names}
        selected = {name for name, _ in self.lm.named_modules() if name.rpartition(".")[2] in parts}
        return sorted(parts if selected == names else names)


def _linear_layer(name: str, module: Any) -> LinearLayer:
    if isinstance(module, Conv1D):
        return LinearLayer(name, module.nx, module.nf)
    return LinearLayer(name, module.in_features, module.out_features)
