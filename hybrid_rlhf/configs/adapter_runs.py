"""RL runs that train together, each with an adapter of its own, on one base (`hybrid-rlhf rl --adapters FILE`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.configs.parsing.building import flat, nested, plain
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.rules import require, require_defaults

DEFAULTS: dict[str, Any] = {"actor": {"lora": {"rank": LoraConfig().rank}}, "resume": "auto"}
"""Settings of runs that give no others: the same command continues them."""
_SHARED = (
    "model.",
    "deterministic",
    "rollout.kv_cache_gib",
    "rollout.max_decode_rows",
    "rollout.prefill_tokens",
    "rollout.cuda_graphs",
    "rollout.keep_weights",
)
"""Keys, or beginnings of keys, that are equal in all runs."""
_UNSUPPORTED = (
    "actor.optimizer.name",
    "actor.ema_decay",
    "actor.zero",
    "model.quantization",
    "model.activation_offload",
    "model.sequence_parallel",
    "model.tensor_parallel",
    "model.expert_parallel",
    "rollout.tensor_parallel",
    "reference.refresh_every",
    "rollout.backend",
    "rollout.dtype",
    "rollout.quantization",
    "rollout.routing_replay",
    "rollout.offload_states",
    "logging.profile_steps",
    "deepspeed_config",
    "teacher",
    "environment",
    "ptx",
    "placement",
    "rollout.async_sampling",
    "rollout.partial",
    "rollout.streaming",
)
"""Keys that have their defaults in a run on a shared base."""
_GLOBAL_SINKS = {"wandb", "mlflow", "trackio"}
"""Sinks with one run per process."""


def read_runs(content: Mapping[str, Any], file: str) -> dict[str, dict[str, Any]]:
    """The settings of each run by its name, nested, from the content of a file, whose keys may be dotted.

    Raises:
        UserError: when there is no run, or one without a name for a folder, or without settings.
    """
    require(content, f"--adapters must name a file of runs, {file} has none: write NAME: {{KEY: VALUE}} lines")
    runs = {}
    for name, section in content.items():
        require(
            isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name),
            f"{file}: the name of a run becomes a folder, got {name!r}: use letters, digits, ., _ and -",
        )
        require(
            section is None or isinstance(section, dict),
            f"{file}: a run is a mapping of keys, {name} is {section!r}: write {name}: {{KEY: VALUE}}",
        )
        runs[name] = nested(section or {})
        require(
            "output_dir" not in runs[name],
            f"{file}: the folder of a run is output_dir/NAME, got an output_dir in {name}: give it on the command line",
        )
    return runs


def check_runs(configs: Mapping[str, RLConfig], file: str) -> None:
    """Check that runs can train on one base.

    Raises:
        UserError: for a setting that they have not in common, or that runs on a shared base do not support.
    """
    first, config = next(iter(configs.items()))
    shared = _shared(config)
    for name, other in configs.items():
        for key, value in _shared(other).items():
            require(
                value == shared[key],
                f"{file}: runs on one base share {key}, got {shared[key]} in {first} and {value} in {name}: give one "
                "value to all",
            )
        require(
            other.critic is None,
            f"runs on one base do not support algorithm {other.algorithm.name}, got it in {name}: give one without a "
            "critic, such as grpo",
        )
        require(
            other.actor.lora is not None,
            f"runs on one base do not support actor.lora None, got it in {name}: leave it out",
        )
        others = {"resume": "auto", "reference.path": other.model.path}
        require_defaults(other, _UNSUPPORTED, f"{name} is a run on a base with other runs", others=others)
        sinks = _GLOBAL_SINKS.intersection(other.logging.sinks)
        require(
            not sinks,
            f"runs on one base do not support logging.sinks {', '.join(sorted(sinks))}, got it in {name}: give "
            "tensorboard, csv or []",
        )


def _shared(config: RLConfig) -> dict[str, Any]:
    return {key: value for key, value in flat(plain(config)).items() if key.startswith(_SHARED)}
