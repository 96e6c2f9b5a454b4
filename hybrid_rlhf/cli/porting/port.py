"""`hybrid-rlhf port FILE_OR_COMMAND --from SYSTEM --output run.yaml`: the configuration of a run of another system as
one of this project."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hybrid_rlhf.cli.porting.conversion import Port, convert, preference_loss
from hybrid_rlhf.cli.porting.reading import Options, read_options
from hybrid_rlhf.configs.commands.port import PortConfig, StepName
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import build_config, nested
from hybrid_rlhf.configs.parsing.other_systems import system
from hybrid_rlhf.configs.parsing.schema import Layer, resolve
from hybrid_rlhf.configs.pipeline import STEPS
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.files.atomic import output_file, write_whole
from hybrid_rlhf.runtime.output import print_result

_PROGRAMS: tuple[tuple[str, StepName, str | None], ...] = (
    ("grpo", "rl", "grpo"),
    ("rloo", "rl", "rloo"),
    ("onlinedpo", "rl", "online_dpo"),
    ("ppo", "rl", None),
    ("kto", "preference", "kto"),
    ("orpo", "preference", "orpo"),
    ("dpo|cpo", "preference", None),
    (r"reward|train_rm|\brm\b", "reward", None),
    ("sft|pretrain|\bpt\b", "sft", None),
)
"""Names of programs, trainers and stages; their step and algorithm."""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Write the configuration, and print what was not carried over."""
    words = [re.sub(r"^--from(?==|$)", "--system", word) for word in (sys.argv[1:] if argv is None else argv)]
    _port(words, prog=prog)


@command(PortConfig, positional="source")
def _port(config: PortConfig) -> None:
    table = system(config.system)
    options = read_options(config.source, table)
    step, algorithm = _step_of(options, config)
    file = output_file(config.output, "output", overwrite=config.overwrite)
    port = Port(config.system, table, step, options, options.processes or config.processes)
    if algorithm is not None:
        port.names = ["trainer"]
        port.set("algorithm.name", algorithm)
    convert(port)
    _leave_out_unknown(port)
    order = [field.name for field in dataclasses.fields(STEPS[step])]
    port.settings = dict(sorted(port.settings.items(), key=lambda item: order.index(item[0].partition(".")[0])))
    remarks = port.grouped_remarks()
    try:
        build_config(STEPS[step], [Layer(nested(port.settings), config.output)])
    except UserError as error:
        remarks.insert(0, f"edit this before the run: {error}")
    write_whole(file, _text(port, file.name, remarks))
    lines = [f"{len(port.settings)} settings in {file}; not carried over:", *remarks]
    lines += [f"run it: hybrid-rlhf {step} --config {file}"]
    print_result({"step": step, "path": str(file), "settings": port.settings, "remarks": remarks}, "\n".join(lines))


def _leave_out_unknown(port: Port) -> None:
    """Leave out settings that the algorithm does not have."""
    name = {key: value for key, value in port.settings.items() if key == "algorithm.name"}
    tree = resolve(STEPS[port.step], [Layer(nested(name))])
    known = {*tree.all_keys(off=True), *name, *(section.name for section in tree.walk(off=True))}
    for key in [key for key in port.settings if key not in known]:
        port.names = port.origins[key].split(", ")
        if not port.options.values.keys().isdisjoint(port.names):
            port.remark(f"{key} is not read by {name.get('algorithm.name', port.step)}")
        del port.settings[key]


def _step_of(options: Options, config: PortConfig) -> tuple[StepName, str | None]:
    """The step of a run, and the algorithm that its program names.

    Raises:
        UserError: if neither the options nor the programs say it.
    """
    values = options.values
    said = [values.get("stage"), values.get("rl"), "reward" if values.get("reward_model") is True else None]
    if config.system == "axolotl":
        said.append("sft")
    if config.system == "verl":
        said = ["ppo"]
    for word in [*filter(None, map(str, filter(None, said))), *reversed(options.programs), *values]:
        for pattern, step, algorithm in _PROGRAMS:
            if re.search(pattern, word.lower().replace("_trainer", "")) and config.step in (None, step):
                loss = preference_loss(word) if algorithm is None and step == "preference" else algorithm
                return step, loss
    if config.step is None:
        raise UserError("port cannot tell the step of the run: give --step sft, reward, preference or rl")
    return config.step, None


def _text(port: Port, name: str, remarks: Sequence[str]) -> str:
    """The configuration, with where each key comes from and what was not carried over."""
    lines = [f"# {port.table.title} as hybrid_rlhf: hybrid-rlhf {port.step} --config {name}"]
    lines += [*_lines(nested(port.settings), "", port.origins, "")]
    if remarks:
        lines += ["", "# Not carried over:", *(f"# - {remark}" for remark in remarks)]
    return "\n".join(lines) + "\n"


def _lines(content: Mapping[str, Any], prefix: str, origins: Mapping[str, str], indent: str) -> list[str]:
    lines = []
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in origins:
            lines += [f"{indent}{name}:", *_lines(value, f"{key}.", origins, f"{indent}  ")]
        else:
            text = yaml.safe_dump(json.loads(json.dumps(value)), default_flow_style=True, width=10_000)
            lines.append(f"{indent}{name}: {text.removesuffix('...' + chr(10)).strip()}  # {origins[key]}")
    return lines
