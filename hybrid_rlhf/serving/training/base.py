"""Interface of the engine that trains many adapters, which engines/adapters implements, one floor above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.open_batch import OpenBatch
from hybrid_rlhf.models.pretrained.adapters import LowRank


class TrainingEngine(Protocol):
    """Many adapters of one base; see `engines.adapters.AdapterEngine`, whose methods these are."""

    lm: PreTrainedModel

    def add(self, name: str, lora: LoraConfig, *, seed: int) -> None:
        """Add a new adapter."""

    def load(self, name: str, folder: Path, *, with_optimizer: bool = False) -> None:
        """Read an adapter from a PEFT folder; one of this name is replaced."""

    def save(self, name: str, folder: Path, *, with_optimizer: bool = False) -> None:
        """Write an adapter as a PEFT folder."""

    def remove(self, name: str) -> None:
        """Remove an adapter."""

    def forward_backward(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Compute rows in one packed batch; an exception leaves all gradients as they were."""

    def step(self, name: str, adam: AdamStep) -> dict[str, float]:
        """Update an adapter with its gradient."""

    def zero_gradient(self, name: str) -> None:
        """Remove the gradient of an adapter."""

    def factors(self, name: str) -> Mapping[str, LowRank]:
        """Copies of an adapter's current factors."""


@dataclass(frozen=True)
class LoadedBase:
    """A base model that trains and generates, with the properties that the service reports."""

    engine: TrainingEngine
    make_row: Callable[..., Any]
    """Makes a row of the engine, see `engines.adapters.AdapterRow`."""
    generation: GenerationEngine
    batch: OpenBatch
    base_model: str
    """Name of the base model in requests."""
    tokenizer: PreTrainedTokenizerBase
    tokenizer_id: str
    """Folder or hub name that clients load the tokenizer from."""
    batch_tokens: int
    """Tokens of a packed micro-batch."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        return self.batch.max_tokens

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.engine.lm.get_input_embeddings().num_embeddings)
