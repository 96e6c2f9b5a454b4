"""A row of the family table: where the weights of a model type are, and what its config does not say.

In names, {} is the layer, {head} the head, and | separates alternatives, the first of which that a layer has counts. A
name is that of a module and stands for its weight and, if there is one, its bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

ROLES = frozenset(
    """
    embed embed_norm embed_in embed_out positions final_norm head
    attention_norm attention_out_norm mlp_norm mlp_out_norm layer_scale
    inputs_embed inputs_project inputs_norm input_gate input_out input_out_norm
    q k v qkv o q_norm k_norm sinks q_down q_down_norm latent_q kv_down kv_down_norm kv_up
    gate up gate_up down router router_norm router_correction experts_up experts_down experts_scale
    dense_out_norm experts_norm experts_out_norm
    shared_gate shared_up shared_gate_up shared_down shared_router
    """.split()
)
"""What a row names; the roles of recurrent layers begin with `recurrent_`."""


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    names: Mapping[str, str]
    """The decoder's names to the model's modules."""
    settings: Callable[[PreTrainedConfig], dict[str, Any]] = field(default=lambda config: {})
    """Fields of ModelDescription that this family derives in its own way."""
    unsupported: Mapping[str, Callable[[PreTrainedConfig], bool]] = field(default_factory=dict)
    """Variants of the family that the decoder does not support, by reason."""
    experts: Callable[[PreTrainedConfig], dict[str, Any]] | None = None
    """Fields of Experts, for a family with a mixture of experts."""
    recurrence: Callable[[PreTrainedConfig], tuple[str, dict[str, Any]]] | None = None
    """Kind of the recurrent layers and its fields (generation/architecture/recurrence.py), if it has some."""
    reads_index: bool = False
    """Whether attention reads the index of a token in its row, beside its position."""

    def __post_init__(self) -> None:
        unknown = sorted(name for name in self.names.keys() - ROLES if not name.startswith("recurrent_"))
        if unknown:
            raise ValueError(f"a family names the modules of roles (ROLES), got {', '.join(unknown)}")

    @property
    def mixer_role(self) -> str | None:
        """Role of a weight of the modules that keep sequences apart only if each is a row; none: there are none."""
        if self.recurrence is not None:
            return "recurrent_out"
        return "o" if self.reads_index else None
