"""RL runs that train together, each with an adapter of its own, on one base (`hybrid-rlhf rl --adapters FILE`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import flat, nested, plain
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.configs.sections.training import ZeroConfig

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
_GLOBAL_SINKS = {"wandb", "mlflow", "trackio"}
"""Sinks with one run per process."""


def read_runs(content: Mapping[str, Any], file: str) -> dict[str, dict[str, Any]]:
    """The settings of each run by its name, nested, from the content of a file, whose keys may be dotted.

    Raises:
        UserError: when there is no run, or one without a name for a folder, or without settings.
    """
    require(bool(content), f"--adapters must name a file of runs, {file} has none: write NAME: {{KEY: VALUE}} lines")
    runs = {}
    for name, section in content.items():
        require(
            isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name) is not None,
            f"{file}: the name of a run becomes a folder, got {name!r}: use letters, digits, ., _ and -",
        )
        if section is not None and not isinstance(section, dict):
            raise UserError(f"{file}: a run is a mapping of keys, {name} is {section!r}: write {name}: {{KEY: VALUE}}")
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
        _check_run(name, other)


def _shared(config: RLConfig) -> dict[str, Any]:
    return {key: value for key, value in flat(plain(config)).items() if key.startswith(_SHARED)}


def _check_run(name: str, config: RLConfig) -> None:
    actor = config.actor
    model = config.model
    rollout = config.rollout
    reference = config.reference
    sinks = _GLOBAL_SINKS.intersection(config.logging.sinks)
    kind = config.algorithm.name
    own_reference = reference.path not in (None, model.path)
    for key, value, barred, remedy in (
        ("algorithm", kind, config.critic is not None, "give one without a critic, such as grpo"),
        ("actor.lora", None, actor.lora is None, "leave it out"),
        ("actor.optimizer.name", actor.optimizer.name, actor.optimizer.name != "adamw", "give adamw"),
        ("actor.ema_decay", actor.ema_decay, actor.ema_decay > 0, "leave it out"),
        ("actor.zero", "other than the defaults", actor.zero != ZeroConfig(), "leave it out"),
        ("model.quantization", model.quantization, model.quantization is not None, "leave it out"),
        ("model.activation_offload", True, model.activation_offload, "leave it out"),
        *(
            (key, count, count > 1, "give 1: each rank has the base")
            for key, count in {
                "model.sequence_parallel": model.sequence_parallel,
                "model.tensor_parallel": model.tensor_parallel,
                "model.expert_parallel": model.expert_parallel,
                "rollout.tensor_parallel": rollout.tensor_parallel,
            }.items()
        ),
        ("reference.path", reference.path, own_reference, "leave it out"),
        ("reference.refresh_every", reference.refresh_every, reference.refresh_every > 0, "leave it out"),
        ("rollout.backend", rollout.backend, rollout.backend != "auto", "give auto"),
        ("rollout.dtype", rollout.dtype, rollout.dtype != "auto", "give auto"),
        ("rollout.quantization", rollout.quantization, rollout.quantization is not None, "leave it out"),
        ("rollout.routing_replay", True, rollout.routing_replay, "leave it out"),
        ("rollout.offload_states", True, rollout.offload_states, "leave it out"),
        ("logging.sinks", ", ".join(sorted(sinks)), bool(sinks), "give tensorboard, csv or []"),
        ("logging.profile_steps", config.logging.profile_steps, bool(config.logging.profile_steps), "leave it out"),
        ("deepspeed_config", config.deepspeed_config, config.deepspeed_config is not None, "leave it out"),
        ("resume", config.resume, config.resume not in ("never", "auto"), "leave it out"),
        *(
            (key, "a section", section is not None, "leave it out")
            for key, section in {
                "teacher": config.teacher,
                "environment": config.environment,
                "ptx": config.ptx,
                "placement": config.placement,
                "rollout.async_sampling": rollout.async_sampling,
                "rollout.partial": rollout.partial,
                "rollout.streaming": rollout.streaming,
            }.items()
        ),
    ):
        require(not barred, f"runs on one base do not support {key} {value}, got it in {name}: {remedy}")
