"""Mixers in packed rows: modules that would mix the sequences of a packed row receive each sequence as a row.

The state and the convolution of a recurrent layer would continue from one sequence into the next, and Llama 4's
attention scales queries by their index in the row and cuts rows into chunks. Such a module is the only one in its layer
that mixes tokens, and it is causal, so rows padded on the right need no mask. All other modules, experts and head
included, compute real tokens only. This holds for any mixer of transformers, with its kernels and with adapters on its
weights. A mixer is called once, with all rows: under ZeRO-3 each call gathers its weights, and all ranks need the same
number of calls.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

from hybrid_rlhf.models.families import family_of
from hybrid_rlhf.models.packing.rows import is_packed, rows_of


def separate_rows(lm: PreTrainedModel) -> None:
    """Let the mixers of a model take packed rows too."""
    family = family_of(lm)
    assert family is not None and family.mixer_role is not None
    modules = dict(lm.named_modules())
    attends = family.recurrence is None
    for layer in range(lm.config.get_text_config().num_hidden_layers):
        name = family.names[family.mixer_role].format(layer)
        if name in modules:  # not every layer is recurrent
            mixer = modules[name.rpartition(".")[0]]
            kind: Any = type(mixer)
            mixer.__class__ = _of_rows(kind, attends)


@functools.cache
def _of_rows(kind: Any, attends: bool) -> Any:
    """A subclass of a mixer, with attention or without, that takes the boundaries of rows as its attention mask."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **named: Any) -> Any:
        if not is_packed(attention_mask):
            return kind.forward(self, hidden_states, *args, attention_mask=attention_mask, **named)
        rows = rows_of(attention_mask)
        padded = rows.pad(hidden_states[0])
        if (rotations := named.get("position_embeddings")) is not None:
            named["position_embeddings"] = tree_map(lambda x: rows.pad(x[0]), rotations)
        mask = _mask(self, padded) if attends else None
        output = kind.forward(self, padded, *args, attention_mask=mask, **named)
        if isinstance(output, tuple):  # with attention weights or a last state, which training does not read
            return rows.unpad(output[0])[None], *output[1:]
        return rows.unpad(output)[None]

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _mask(attention: Any, padded: Tensor) -> Tensor | None:
    """transformers' mask of a layer's attention over rows [B, L, H]; None: causal."""
    make = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[attention.config.layer_types[attention.layer_idx]]
    return make(config=attention.config, inputs_embeds=padded, attention_mask=None, past_key_values=None)
