"""Options of another system out of a YAML file, a shell script, a command or a Python script. Nothing is executed."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.other_systems import System
from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml, yaml_value
from hybrid_rlhf.runtime.files.reading import read_text

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")
_LAUNCHER = (*_PROCESSES, "module", "standalone", "nnodes", "config_file", "address", "runtime_env_json", "include")
_SCRIPT_CALLS = re.compile(r"(Config|Arguments|Trainer)$|^load_dataset$|from_pretrained$")


@dataclass
class Options:
    """The options that were given, and the words that say which program they are for."""

    values: dict[str, Any] = field(default_factory=dict)
    programs: list[str] = field(default_factory=list)
    script: Path | None = None
    """The Python script that they come from."""
    modules: dict[str, str] = field(default_factory=dict)
    """Names that the script imports, as module:name."""
    unread: list[str] = field(default_factory=list)
    """Options whose values are expressions."""
    processes: int | None = None
    """Processes that the launcher starts."""


def read_options(given: str, table: System) -> Options:
    """The options of a file, or of a command as one text."""
    path = Path(given).expanduser()
    if not os.path.isfile(path):  # a whole command is longer than a name may be
        if not re.search(r"\s", given):
            raise UserError(f"a file or a command must be given, got {given}, which is no file: check the path")
        return _of_shell(given)
    text = read_text(path, "port must be given a file or a command")
    if path.suffix in (".yaml", ".yml"):
        return Options(dict(_dotted(parse_yaml(text, str(path)), table)))
    return _of_python(text, path) if path.suffix == ".py" else _of_shell(text)


def _dotted(content: Mapping[Any, Any], table: System, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of nested mappings by dotted names; a mapping that is one option stays whole."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and not any(name in row.names for row in table.rows + table.others):
            yield from _dotted(value, table, f"{name}.")
        else:
            yield name, value


def value_of(text: str) -> Any:
    """The value of an option on a command line."""
    try:
        return yaml_value(text, "an option")
    except UserError:
        return text


def _of_shell(text: str) -> Options:
    """Options `--NAME VALUE ...`, `--NAME=VALUE` and `NAME=VALUE` of all commands; variables that the text sets are
    replaced."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"a command must have paired quotes, got an error ({error}): fix it") from error
    variables = dict(os.environ)
    options = Options()
    name: str | None = None
    for word in _expanded(words, variables):
        assigned = _ASSIGNMENT.fullmatch(word)
        flag = re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        dotted = re.fullmatch(r"\+{0,2}([A-Za-z]\w*(?:\.[\w-]+)+)=(.*)", word, re.DOTALL)
        if flag:
            name = flag[1].replace("-", "_")
            options.values[name] = True if flag[2] is None else value_of(flag[2])
        elif dotted:
            options.values[dotted[1]] = value_of(dotted[2])
            name = None
        elif assigned and name is None:
            variables[assigned[1]] = assigned[2].lstrip("(")
        elif name is not None and not re.match(r"-[A-Za-z]|EOF$|[)}]$", word):
            previous = options.values[name]
            value = value_of(word)
            options.values[name] = value if previous is True else [*_listed(previous), value]
            name = None if name in _LAUNCHER else name
        else:
            options.programs.append(word)
            name = None
    launched = {key: options.values.pop(key) for key in _LAUNCHER if key in options.values}
    options.programs += [str(value) for value in launched.values()]
    options.processes = next((launched[key] for key in _PROCESSES if isinstance(launched.get(key), int)), None)
    options.unread = [key for key, value in options.values.items() if "$" in str(value)]
    return options


def _expanded(words: list[str], variables: dict[str, str]) -> Iterator[str]:
    for word in words:
        yield _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[3] or found[0]), word).lstrip("(")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _of_python(text: str, path: Path) -> Options:
    """Keywords of configs, trainers and `load_dataset`, as far as they are constants or names of constants."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(
            f"{path}:{error.lineno}: a script must be Python, got an error ({error.msg}): fix it"
        ) from error
    except (ValueError, RecursionError) as error:  # a null byte; brackets nested too deeply
        raise UserError(f"{path}: a script must be Python, got an error ({error}): fix it") from error
    options = Options(script=path)
    options.modules = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not _SCRIPT_CALLS.search(called.rpartition(".")[2]):
            continue
        options.programs.append(called.rpartition(".")[2])
        if called.endswith("load_dataset"):
            _add_data_set(options, node, constants)
        elif called.endswith("from_pretrained"):
            if node.args and "Model" in called:
                options.values.setdefault("model_name_or_path", _constant(node.args[0], constants))
        else:
            for position, argument in zip(("model",), node.args, strict=False):
                _add(options, position, argument, constants)
            for keyword in node.keywords:
                if keyword.arg:
                    _add(options, keyword.arg, keyword.value, constants)
    return options


def _add(options: Options, name: str, node: ast.expr, constants: dict[str, ast.expr]) -> None:
    value = _constant(node, constants)
    if name == "model":
        if isinstance(value, str):
            options.values["model_name_or_path"] = value
    elif name in ("reward_funcs", "reward_func"):
        functions = node.elts if isinstance(node, ast.List) else [node]
        options.values["reward_funcs"] = [
            item
            if isinstance(item := _constant(each, constants), str)
            else options.modules.get(ast.unparse(each), f"{options.script}:{ast.unparse(each)}")
            for each in functions
        ]
    elif value is not None or isinstance(node, ast.Constant):
        options.values[name] = value
    elif name not in ("args", "train_dataset", "eval_dataset", "processing_class", "peft_config", "ref_model"):
        options.values[name] = ast.unparse(node)
        options.unread.append(name)


def _add_data_set(options: Options, node: ast.Call, constants: dict[str, ast.expr]) -> None:
    given = {keyword.arg: _constant(keyword.value, constants) for keyword in node.keywords}
    name = _constant(node.args[0], constants) if node.args else given.get("path")
    files = given.get("data_files")
    split = str(given.get("split") or "train")
    is_evaluation = "train" not in split and "dataset_name" in options.values
    options.values["eval_dataset" if is_evaluation else "dataset_name"] = (
        files if isinstance(files, str | list) else name
    )
    options.values["dataset_test_split" if is_evaluation else "dataset_train_split"] = split.partition("[")[0]


def _constant(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    """The value of a constant, a name of one, or `torch.bfloat16` as a text; None for another expression."""
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        return node.attr
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # an expression; a list as a key
        return None
