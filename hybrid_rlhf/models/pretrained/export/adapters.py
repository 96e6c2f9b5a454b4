"""Merges a PEFT adapter from a folder into a model."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files.reading import read_json_object
from hybrid_rlhf.models.pretrained.folders import reading

_CONFIG, _WEIGHTS, _NAME = "adapter_config.json", "adapter_model.safetensors", "default"


@torch.no_grad()
def merge_adapter(lm: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with an adapter merged into its weights, in their dtype; the model given is used up.

    Raises:
        UserError: when the folder has no adapter in safetensors, or it does not fit the model.
    """
    path = Path(folder).expanduser()
    read_json_object(path / _CONFIG, "an adapter's adapter_config.json")
    if not (path / _WEIGHTS).is_file():  # peft would read a pickle
        raise UserError(
            f"an adapter's weights must be safetensors, {folder} has no {_WEIGHTS}: save it again with peft"
        )
    with reading(f"the adapter {folder} must fit {type(lm).__name__}", "give the model that it was trained on"):
        model = PeftModel(lm, PeftConfig.from_pretrained(str(path)), _NAME)
        found = model.load_adapter(str(path), _NAME)  # PeftModel.from_pretrained only warns of these
        faulty = [*found.missing_keys, *found.unexpected_keys]
        if faulty:
            raise ValueError(f"{len(faulty)} weights are missing or left over, for example {faulty[0]}")
        merged: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    return merged
