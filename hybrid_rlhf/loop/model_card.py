"""The model card of a trained model: its description, held-out metrics, and the settings and versions of its training.

Paths of this machine are omitted, as a card is published with the model.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import yaml

from hybrid_rlhf.configs.parsing.building import nested
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.configs.sections.run import StepConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.models.pretrained.cards import read_card_metadata, render_card, texts
from hybrid_rlhf.runtime.command_line import read_config
from hybrid_rlhf.runtime.environment import versions
from hybrid_rlhf.runtime.observability.formatting import format_value
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.run import Run

_HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
_SETTINGS = ("algorithm", "objective", "train", "optimizer", "lora", "actor", "critic", "rollout", "distill", "seed")
"""Keys and sections of a config that describe the training."""
_NOT_SHOWN = re.compile(r"(^|\.)(path|resume|cache_dir|save_\w+|keep_\w+|teacher|placement.*)(\.|$)")


def model_card(run: Run, name: str, *, generates: bool, sees: bool = False) -> str:
    """The card of a model of a run.

    Args:
        run: run of the model; metrics.jsonl must be on disk.
        name: the model's subfolder in the run folder; "" is the run folder itself.
        generates: true for a causal LM, false for a model that gives scores.
        sees: true for a model that reads images.
    """
    config = run.config
    role = name.partition("_")[0]
    method, tag = _method(config)
    parent = read_card_metadata(Path(str(config.model.path))) if config.model.path else {}
    bases = texts(config.model.path if _is_on_hub(str(config.model.path)) else parent.get("base_model"))
    sources = [source.path if isinstance(source, DataSource) else source for source in config.data.sources]
    metadata = {
        "base_model": bases[0] if len(bases) == 1 else bases,
        "datasets": sorted({*filter(_is_on_hub, sources), *texts(parent.get("datasets"))}),
        "library_name": "transformers",
        "license": parent.get("license"),
        "pipeline_tag": ("image-text-to-text" if sees else "text-generation") if generates else "text-classification",
        "tags": ["hybrid_rlhf", tag, *([role] if role not in ("", "actor") else [])],
    }
    title = "/".join(part for part in (run.folder.resolve().name, name) if part)
    what = "A causal language model" if generates else "A model that scores conversations"
    start = f"from {', '.join(f'`{base}`' for base in bases) or 'a local model'}"
    text = [
        f"# {title}",
        f"{what}, trained {start} by {method} with hybrid_rlhf.",
        _metrics(run.folder),
        f"## Training\n\n```yaml\n{yaml.safe_dump(_settings(config), sort_keys=False)}```",
        f"Versions: {', '.join(f'{package} {version}' for package, version in versions().items())}; "
        f"{run.world.size} {'process' if run.world.size == 1 else 'processes'}.",
    ]
    return render_card(metadata, "\n\n".join(part for part in text if part))


def _method(config: StepConfig) -> tuple[str, str]:
    """Method of training of a step, in words and as a tag."""
    if isinstance(config, RLConfig | PreferenceStepConfig):
        return config.algorithm.name.upper(), config.algorithm.name
    if isinstance(config, RewardConfig):
        return "reward modeling", "reward-model"
    distills = isinstance(config, SFTConfig) and config.distill is not None
    return ("distillation", "distillation") if distills else ("supervised fine-tuning", "sft")


def _is_on_hub(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def _metrics(folder: Path) -> str:
    """A table of the held-out metrics before and after training; "" without any."""
    lines = read_metrics(folder)
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("eval/"))
    rows = []
    for name in names:
        values = [float(line[name]) for line in lines if name in line and math.isfinite(line[name])]
        if values:
            first = format_value(values[0]) if len(values) > 1 else ""
            rows.append(f"| {name.removeprefix('eval/')} | {first} | {format_value(values[-1])} |")
    if not rows:
        return ""
    return "\n".join(["## Held-out metrics", "", "| metric | before | after |", "|---|---|---|", *rows])


def _settings(config: StepConfig) -> dict[str, Any]:
    values = {
        key: value
        for key, value in read_config(config).items()
        if key.partition(".")[0] in _SETTINGS and not _NOT_SHOWN.search(key) and value not in (None, [], {})
    }
    return nested(values)
