"""Values of another system's options as settings of this project; see configs/parsing/other_systems.py for the names.

A conversion takes the options of all rows that name it, because one key often has several of them (the batch size), and
sets keys of a `Port` or leaves a remark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any

from hybrid_rlhf.cli.porting.reading import Options
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.other_systems import Row, System, value_advice, with_paths
from hybrid_rlhf.configs.preference import PREFERENCE_LOSSES
from hybrid_rlhf.runtime.files.reading import read_json_object

Given = Mapping[str, Any]
_SECRET = re.compile(r"(wandb|hub|api|auth)\w*[._]\w*(key|token)|secret|password")
"""Names of options whose values are not written."""
_ROLES = ("optimizer", "lora", "zero")
"""Sections that RL has for the actor and the critic."""


@dataclass
class Port:
    """The settings so far."""

    system: str
    table: System
    step: str
    options: Options
    processes: int
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """By key, the options that it comes from."""
    remarks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options that were not carried over and their values, by the reason."""
    names: list[str] = field(default_factory=list)
    """Options that are being converted."""

    def set(self, key: str, value: Any) -> None:
        """Set a key; sections of roles are the actor's in RL."""
        if self.step == "rl" and key.partition(".")[0] in _ROLES:
            key = f"actor.{key}"
        self.settings[key] = value
        given = [name for name in self.names if name in self.options.values]
        self.origins[key] = ", ".join(given) or f"default of {self.table.title}"

    def row(self, name: str) -> Row:
        """The row about an option that is in the table."""
        row = self.table.find(name, self.step)
        assert row is not None
        return row

    def remark(self, reason: str) -> None:
        """Say why the present options were not carried over."""
        given = {
            name: "***" if _SECRET.search(name) else self.options.values[name]
            for name in self.names
            if name in self.options.values
        }
        self.remarks.setdefault(with_paths(reason), {}).update(given)

    def grouped_remarks(self) -> list[str]:
        """A line per reason, after the options if it is not about defaults alone."""
        return [
            ", ".join(f"{name} {json.dumps(value, default=str)}" for name, value in given.items())
            + (f": {reason}" if given else reason)
            for reason, given in self.remarks.items()
        ]

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Another option's value, or the other system's default."""
        value = self.options.values.get(name)
        return otherwise if value is None else value


Conversion = Callable[[Port, Given], None]
CONVERSIONS: dict[str, Conversion] = {}
"""The conversions, by the names that rows have."""


def _conversion(function: Conversion) -> Conversion:
    CONVERSIONS[function.__name__.removeprefix("_")] = function
    return function


def convert(port: Port) -> None:
    """Fill in the settings from all options and from defaults of the other system that have another effect here."""
    groups: dict[str, dict[str, Any]] = {}
    values = _with_defaults(port)
    for name, value in values.items():
        row = port.table.find(name, port.step)
        port.names = [name]
        if name in port.options.unread:
            port.remark("an expression; fill in its value")
        elif row is None:
            elsewhere = port.table.find(name)
            port.remark("not an option of this step" if elsewhere else f"not known of {port.table.version}")
        elif row.by is not None:
            groups.setdefault(row.by, {})[name] = value
        elif not row.keys and value not in (None, False, "", []):
            port.remark(str(row.none))
        elif row.keys and value is not None and (row.when is None or values.get(row.when)):
            _set_plain(port, name, value, row)
    for by, given in groups.items():
        port.names = [*given]
        try:
            CONVERSIONS[by](port, given)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            port.remark(f"values of another form than expected ({error}): set their keys by hand")


def _set_plain(port: Port, name: str, value: Any, row: Row) -> None:
    patterns = [pattern for pattern in row.values if fnmatchcase(str(value), str(pattern))]
    if not patterns and row.values and isinstance(value, str):
        port.remark(f"set {' or '.join(row.keys)}; known are {', '.join(map(str, row.values))}")
        return
    converted = row.values[patterns[0]] if patterns else value
    if converted is not None:
        critic = "critic." if name.startswith("critic.") and row.keys[0].startswith("optimizer") else ""
        for key in row.keys_of(name):
            port.set(critic + key, _plain(converted))


def _with_defaults(port: Port) -> dict[str, Any]:
    """The options, and defaults of the other system that have another effect here."""
    values = dict(port.options.values)
    for row in port.table.rows:
        if row.default is None or (row.steps and port.step not in row.steps):
            continue
        default = row.default.get(port.step) if isinstance(row.default, dict) else row.default
        defaults = default if isinstance(default, list) else [default]
        if len(defaults) > 1 or not any(row.matches(name) for name in values):
            for name, value in zip(row.names, defaults, strict=False):
                values.setdefault(name, value)
    return values


def _plain(value: Any) -> Any:
    """3.0 as an integer, and a date, as which YAML reads the name of a run, as a text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value) if isinstance(value, date) else value


def _leaf(given: Given, *names: str) -> Any:
    """The value of the first of some options, by the last parts of their names."""
    for name in names:
        for full, value in given.items():
            if full.rpartition(".")[2] == name and value is not None:
                return value
    return None


@_conversion
def _nothing(port: Port, given: Given) -> None:
    for name in [name for name, value in given.items() if value]:
        port.names = [name]
        row = port.row(name)
        port.remark(f"set {' or '.join(dict.fromkeys(row.keys_of(name)))}" + (f" ({row.note})" if row.note else ""))


# The length of a run


@_conversion
def _batch(port: Port, given: Given) -> None:
    rows = _leaf(given, "per_device_train_batch_size", "micro_batch_size")
    accumulated = _leaf(given, "gradient_accumulation_steps")
    if rows is not None:
        port.set("train.global_batch_size", int(rows) * int(accumulated or 1) * port.processes)


@_conversion
def _trl_rollout(port: Port, given: Given) -> None:
    completions = port.get("num_generations", 8)
    update = int(given["per_device_train_batch_size"]) * int(given["gradient_accumulation_steps"]) * port.processes
    size = given.get("generation_batch_size") or (
        int(given["per_device_train_batch_size"])
        * port.processes
        * int(given.get("steps_per_generation") or given["gradient_accumulation_steps"])
    )
    _rollout(port, Fraction(int(size), int(completions)), Fraction(int(size), update))


@_conversion
def _openrlhf_rollout(port: Port, given: Given) -> None:
    prompts, completions = int(given["rollout.batch_size"]), int(given["rollout.n_samples_per_prompt"])
    port.set("rollout.sampling.n", completions)
    _rollout(port, Fraction(prompts), Fraction(prompts * completions, int(given["train.batch_size"])))


@_conversion
def _verl_rollout(port: Port, given: Given) -> None:
    prompts, update = int(given["data.train_batch_size"]), int(given["actor_rollout_ref.actor.ppo_mini_batch_size"])
    _rollout(port, Fraction(prompts), Fraction(prompts, update))


def _rollout(port: Port, prompts: Fraction, updates: Fraction) -> None:
    if prompts.denominator > 1:
        port.remark(f"a rollout has {float(prompts):g} prompts: whole prompts are sampled here")
    if updates.denominator > 1 or updates < 1:
        port.remark(f"a rollout has {float(updates):g} updates: a whole number here")
    port.set("rollout.prompts_per_step", max(1, round(prompts)))
    port.set("algorithm.mini_batches", max(1, round(updates)))


@_conversion
def _openrlhf_max_len(port: Port, given: Given) -> None:
    length = int(given["data.max_len"])
    if port.step == "rl":
        length -= int(port.get("rollout.max_new_tokens", length // 2))
        port.set("rollout.sampling.max_new_tokens", int(port.get("rollout.max_new_tokens", length)))
    port.set("rollout.max_prompt_tokens" if port.step == "rl" else "data.max_length", length)


# The optimizer


@_conversion
def _warmup(port: Port, given: Given) -> None:
    ratio, steps = _leaf(given, "warmup_ratio"), float(_leaf(given, "warmup_steps") or 0)
    total = float(port.get("max_steps") or 0)
    if ratio or 0 < steps < 1:
        port.set("optimizer.warmup_fraction", float(ratio or steps))
    elif steps and total > 0:
        port.set("optimizer.warmup_fraction", round(steps / total, 4))
    elif steps:
        port.remark("a fraction of the steps here: optimizer.warmup_fraction")
    else:
        port.set("optimizer.warmup_fraction", 0.0)


@_conversion
def _pair(port: Port, given: Given) -> None:
    """Two options that are one key, or one that stands for both."""
    for row in dict.fromkeys(port.row(name) for name in given):
        names = [name for name in row.names if given.get(name) is not None]
        if not port.options.values.keys().isdisjoint(names):
            port.names = names
            values = [float(given[name]) for name in names]
            port.set(row.keys[0], [values[0], values[-1]])


# Models and adapters


@_conversion
def _adapters(port: Port, given: Given) -> None:
    kind = _leaf(given, "finetuning_type", "adapter")
    rank = _leaf(given, "lora_r", "r", "lora_rank", "rank")
    if kind in ("full", "freeze") or (kind is None and not rank and not given.get("use_peft")):
        return
    if kind not in (None, "lora", "qlora"):
        port.remark("adapters are LoRA")
    port.set("lora.rank", int(rank or 8))
    alpha = _leaf(given, "lora_alpha", "alpha") or (2 * int(rank or 8) if port.system == "llamafactory" else None)
    if alpha is not None:
        port.set("lora.alpha", float(alpha))
    targets = _leaf(given, "lora_target_modules", "lora_target", "target_modules")
    if given.get("lora_target_linear") or targets in ("all", ["all-linear"]):
        targets = "all-linear"
    if isinstance(targets, str) and "," in targets:
        targets = targets.split(",")
    if targets is not None:
        port.set("lora.target_modules", targets)
    # moments of adapters are small, and in 32 bits here
    port.settings.update((key, "adamw") for key, value in port.settings.items() if value == "adamw_8bit")


@_conversion
def _parallel(port: Port, given: Given) -> None:
    for name, value in given.items():
        port.names = [name]
        if int(value) > 1 and port.processes % int(value):
            port.remark(f"set {port.row(name).keys_of(name)[0]}, with a multiple of as many processes")
        elif int(value) > 1:
            port.set(port.row(name).keys_of(name)[0], int(value))


@_conversion
def _verl_offload(port: Port, given: Given) -> None:
    for name, value in given.items():
        if value:
            role = "critic" if name.startswith("critic") else "actor"
            key = "offload_parameters" if name.endswith("param_offload") else "offload_optimizer"
            port.set(f"{role}.zero.{key}", True)
            port.set(f"{role}.zero.stage", 3)


# Algorithms


@_conversion
def _preference(port: Port, given: Given) -> None:
    smoothing = float(_leaf(given, "label_smoothing", "dpo_label_smoothing") or 0)
    loss = _leaf(given, "loss_type", "pref_loss")
    chosen = preference_loss(loss[0] if isinstance(loss, list) else str(loss)) if loss else None
    if loss and (chosen is None or (isinstance(loss, list) and len(loss) > 1)):
        port.remark("set algorithm.name: this loss has no counterpart, or is a sum")
    if smoothing and chosen in (None, "dpo"):
        port.set("algorithm.label_smoothing", smoothing)
        chosen = "cdpo"
    if chosen is not None:
        port.set("algorithm.name", chosen)


def preference_loss(name: str) -> str | None:
    """The preference loss of this project for that of another system."""
    return value_advice("algorithm.name", name, PREFERENCE_LOSSES)


@_conversion
def _kl(port: Port, given: Given) -> None:
    (coefficient,) = (float(value) for value in given.values())
    key = "algorithm.beta" if port.settings.get("algorithm.name") == "online_dpo" else "algorithm.kl.coef"
    port.set(key if coefficient else "algorithm.kl", coefficient or None)


@_conversion
def _verl_kl(port: Port, given: Given) -> None:
    where = {"use_kl_loss": "loss", "use_kl_in_reward": "reward"}
    used = [where[name.rpartition(".")[2]] for name, value in given.items() if value]
    port.set("algorithm.kl.where" if used else "algorithm.kl", used[0] if used else None)


@_conversion
def _verl_loss(port: Port, given: Given) -> None:
    (loss,) = given.values()
    algorithms = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo"}
    if loss in algorithms:
        port.set("algorithm.name", algorithms[loss])
    elif loss == "dppo_tv":
        port.set("algorithm.clip_of", "probability")
    elif loss != "vanilla":
        port.remark(f"set algorithm.name; known are vanilla, dppo_tv, {', '.join(algorithms)}")


@_conversion
def _trl_loss(port: Port, given: Given) -> None:
    loss = str(given["loss_type"])
    normal = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "fixed", "luspo": "sequence_sum"}
    base = port.settings.get("algorithm.name", "grpo")
    if given.get("importance_sampling_level") == "sequence":
        port.set("algorithm.name", "gspo")
        if loss == "luspo":
            port.set("algorithm.loss_normalization", normal[loss])
    elif given.get("multi_objective_aggregation") == "normalize_then_sum":
        port.set("algorithm.name", "gdpo")
    elif loss in ("cispo", "sapo", "vespo"):
        port.set("algorithm.name", loss)
    elif base == "grpo" and loss in normal:
        port.set("algorithm.loss_normalization", normal[loss])
    elif "loss_type" in port.options.values and loss not in normal:
        port.remark("set algorithm.name or algorithm.loss_normalization")


# Data and rewards


def _texts(value: Any) -> list[str]:
    """A list, or a text with commas, as texts."""
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def _sources(
    port: Port,
    key: str,
    names: Any,
    *,
    split: Any = None,
    weights: Any = None,
    columns: Mapping[str, Any] | None = None,
) -> None:
    renamed = {ours: theirs for ours, theirs in (columns or {}).items() if theirs and theirs != ours}
    shares = [float(share) for share in _texts(weights)] if weights else []
    sources = []
    for index, path in enumerate(_texts(names)):
        source: dict[str, Any] = {"path": path}
        if shares:
            source["weight"] = shares[index] / max(shares)
        if split and split != "train":
            source["split_name"] = str(split)
        if renamed:
            source["columns"] = renamed
        sources.append(source if len(source) > 1 else path)
    port.set(key, sources)


@_conversion
def _trl_sources(port: Port, given: Given) -> None:
    named = given.get("dataset_name") or given.get("train_dataset")
    if named:
        _sources(port, "data.sources", named, split=given.get("dataset_train_split"))
        if given.get("eval_dataset"):
            _sources(port, "data.eval_sources", given["eval_dataset"], split=given.get("dataset_test_split"))
        elif given.get("dataset_test_split") and port.get("eval_strategy", "no") != "no":
            _sources(port, "data.eval_sources", named, split=given["dataset_test_split"])
    elif given.get("datasets"):
        port.set("data.sources", [_data_set(port, entry) for entry in given["datasets"]])


def _data_set(port: Port, entry: Mapping[str, Any]) -> Any:
    """An item of TRL's or axolotl's list of data sets."""
    if entry.get("type") not in (None, "chat_template"):
        port.remark("rows of another format than this project's become some by `hybrid-rlhf data convert`")
    files, split = entry.get("data_files"), str(entry.get("split") or "train").partition("[")[0]
    path = files if isinstance(files, str) else str(entry["path"])
    return path if split == "train" else {"path": path, "split_name": split}


@_conversion
def _openrlhf_sources(port: Port, given: Given) -> None:
    names = _leaf(given, "prompt_dataset") or given.get("data.dataset")
    keys = {
        name: given.get(f"data.{name}_key")
        for name in ("input", "output", "prompt", "chosen", "rejected", "label", "image")
    }
    columns = {"prompt": keys["prompt"] or keys["input"], "chosen": keys["chosen"], "rejected": keys["rejected"]}
    columns |= {"completion": keys["output"], "images": keys["image"]}
    if given.get("data.multiturn") or keys["input"] == "messages":
        columns["prompt"] = None
    if port.step == "rl" and keys["label"]:
        columns["label"] = keys["label"]
    weights = _leaf(given, "prompt_probs", "dataset_probs")
    if names:
        split = _leaf(given, "prompt_split", "dataset_split")
        _sources(port, "data.sources", names, split=split, weights=weights, columns=columns)
    if given.get("eval.dataset"):
        _sources(port, "data.eval_sources", given["eval.dataset"], split=given.get("eval.split"), columns=columns)


@_conversion
def _verl_sources(port: Port, given: Given) -> None:
    columns = {"prompt": given.get("data.prompt_key"), "ground_truth": "reward_model.ground_truth"}
    columns["images"] = given.get("data.image_key")
    for key, name in (("data.sources", "data.train_files"), ("data.eval_sources", "data.val_files")):
        if given.get(name):
            _sources(port, key, given[name], columns=columns)


@_conversion
def _llamafactory_sources(port: Port, given: Given) -> None:
    folder = Path(str(given.get("dataset_dir") or "data"))
    listed = folder / "dataset_info.json"
    known = read_json_object(listed, listed.name) if listed.is_file() else {}
    for key, name in (("data.sources", "dataset"), ("data.eval_sources", "eval_dataset")):
        if given.get(name):
            entries = {each: known.get(each, {}) for each in _texts(given[name])}
            for each, entry in entries.items():
                if not isinstance(entry, dict) or not isinstance(entry.get("file_name", ""), str):
                    rule = "a data set is an object with the text file_name"
                    raise UserError(f"{listed}: {rule}, got {each} {entry}: fix it")
            paths = [
                str(folder / entry["file_name"]) if "file_name" in entry else str(entry.get("hf_hub_url", each))
                for each, entry in entries.items()
            ]
            _sources(port, key, paths)
            if not all(entry.get("formatting") == "openai" for entry in entries.values()):
                port.remark("rows of another format than this project's become some by `hybrid-rlhf data convert`")
    if given.get("val_size"):
        port.set("data.eval_fraction", float(given["val_size"]))


@_conversion
def _axolotl_sources(port: Port, given: Given) -> None:
    for key, name in (("data.sources", "datasets"), ("data.eval_sources", "test_datasets")):
        if given.get(name):
            port.set(key, [_data_set(port, entry) for entry in given[name]])
    size = float(given.get("val_set_size") or 0)
    if size < 1:
        port.set("data.eval_fraction", size)
    else:
        port.remark("data.eval_fraction is a fraction of the rows")


@_conversion
def _components(port: Port, given: Given) -> None:
    rewards = given.get("reward_funcs") or given.get("reward_model_path") or []
    weights = given.get("reward_weights") or []
    components = []
    for index, reward in enumerate(rewards if isinstance(rewards, list) else [rewards]):
        component = {"function": reward} if ":" in str(reward) else {"model": reward}
        if weights:
            component["weight"] = float(weights[index])
        components.append(component)
    if port.options.script and any("function" in component for component in components):
        port.remark("the script is imported for its functions: its training must be under `if __name__ == '__main__'`")
    port.set("reward.components", components)


@_conversion
def _openrlhf_components(port: Port, given: Given) -> None:
    components: list[dict[str, Any]] = [
        {"model": path} for path in _texts(given.get("reward.model_name_or_path") or "")
    ]
    urls = _texts(given.get("reward.remote_url") or "")
    components += [{"function": f"{file}:reward_func"} for file in urls if file.endswith(".py")]
    if served := [url for url in urls if not url.endswith(".py")]:
        components.append({"urls": served, "protocol": "openrlhf"})
    if given.get("reward.normalize_enable"):
        port.set("algorithm.score_scaling", "running")
    if components:
        port.set("reward.components", components)


@_conversion
def _verl_components(port: Port, given: Given) -> None:
    components: list[dict[str, Any]] = []
    if path := _leaf({name: value for name, value in given.items() if "function" in name}, "path"):
        components.append({"function": f"{path}:{_leaf(given, 'name') or 'compute_score'}"})
    models = {name: value for name, value in given.items() if "function" not in name}
    if _leaf(models, "enable"):
        components.append({"model": _leaf(models, "path", "model_path")})
    if not components:
        port.remark("the reward depends on `data_source` there; here {verifier: math} compares answers: check it")
        components = [{"verifier": "math", "column": "ground_truth"}]
    port.set("reward.components", components)


# The run


@_conversion
def _sinks(port: Port, given: Given) -> None:
    wanted = _texts(next(iter(given.values())))
    known = ("tensorboard", "wandb", "mlflow", "trackio", "csv")
    port.set("logging.sinks", [sink for sink in known if sink in wanted or "all" in wanted])
