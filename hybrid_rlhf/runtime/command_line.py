"""Begin and end of a command: its config from the command line and the files that it names, and one line on stderr with
exit code 2 for a user's mistake.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from hybrid_rlhf.configs.credentials import redacted
from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.configs.parsing.building import build_config, flat, plain, read_words
from hybrid_rlhf.configs.parsing.help import Help
from hybrid_rlhf.configs.parsing.listing import changed_keys
from hybrid_rlhf.configs.parsing.schema import Layer, resolve
from hybrid_rlhf.configs.parsing.yaml_text import parse_yaml
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.disk import disk_fault
from hybrid_rlhf.runtime.files.names import CONFIG_FILE
from hybrid_rlhf.runtime.files.reading import read_text
from hybrid_rlhf.runtime.observability.logs import log_to_stderr
from hybrid_rlhf.runtime.openmp import wait_asleep
from hybrid_rlhf.runtime.output import print_document, print_result, wants_json

ConfigT = TypeVar("ConfigT")
PACKAGE = Path(__file__).parents[1]
"""Folder of the package, in the checkout or in site-packages."""
USER_ERROR_CODE = 2
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
ERROR_FILE = "HYBRID_RLHF_ERROR_FILE"
"""Environment variable with the file to which a process writes a user's mistake, for the command that started it: a
launcher in between may end with another exit code."""


def parse_config(
    config_type: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    defaults: Path | Mapping[str, Any] | None = None,
    positional: str | Sequence[str] = (),
) -> ConfigT:
    """A config from `--config FILE.yaml` and dotted overrides such as `--optimizer.lr 1e-5`.

    Args:
        config_type: a dataclass of configs/.
        argv: the words of the command line; None: those of the process.
        prog: the name that --help shows.
        defaults: settings that the user's files override, nested or in a YAML file.
        positional: keys whose values the first words may give without their names; a list takes all words up to the
            first option.

    Raises:
        UserError: for an unknown key, a wrong value, a file that cannot be read, or a rule of the config.
        SystemExit: after --help.
    """
    positional = [positional] if isinstance(positional, str) else positional
    files, overrides, wants_help = read_words(sys.argv[1:] if argv is None else argv, config_type, positional)
    layers = []
    if isinstance(defaults, Path):
        layers = [Layer(read_file(str(defaults)), str(defaults), strict=False)]
    elif defaults is not None:
        layers = [Layer(defaults, strict=False)]
    layers += [Layer(read_file(file), file) for file in files]
    layers += overrides
    if wants_help:
        tree = resolve(config_type, layers)
        shown = Help(tree, prog or Path(sys.argv[0]).name, wants_help == "--help-all", positional)
        print_result(shown.document(), shown.text())
        sys.exit(0)
    return build_config(config_type, layers)


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command of this package that this one starts, with its output unbuffered."""
    environment = {**base, "PYTHONUNBUFFERED": "1"}
    root = PACKAGE.parent
    if root.name not in ("site-packages", "dist-packages"):  # a checkout, which need not be installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), base.get("PYTHONPATH"))))
    return environment


def read_config(config: Any) -> dict[str, Any]:
    """A config, or the file that save_config wrote, as dotted keys and plain values."""
    return flat(yaml.safe_load(config.read_text()) if isinstance(config, Path) else plain(config))


def changed_settings(config: Any) -> list[str]:
    """Keys whose values differ from the run in the folder of a step; those that do not affect results are ignored."""
    file = Path(config.output_dir) / CONFIG_FILE
    return changed_keys(type(config), read_config(file), read_config(config)) if file.exists() else []


def save_config(config: Any, path: Path) -> None:
    """Write a config as the YAML that parse_config reads back."""
    write_whole(path, yaml.safe_dump(plain(config), sort_keys=False))


def is_first_rank() -> bool:
    """True on the rank whose command prints the result, also before the ranks have met."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def user_errors(*, is_rank: bool = False) -> Iterator[None]:
    """Context of a command, which turns a user's mistake or a disk's fault into one line on stderr, or JSON on stdout,
    and exit code 2, and Ctrl-C into the line "stopped" and a shell's exit code for it.

    Args:
        is_rank: true if the command may be one of several ranks, which end with their launcher.
    """
    file = os.environ.pop(ERROR_FILE, None)  # child processes must not write it
    wait_asleep()
    try:
        if is_rank:
            from hybrid_rlhf.runtime.liveness.launcher import stop_with_launcher

            stop_with_launcher()
        yield
    except UserError as error:
        _stop(str(error), file, every_rank=isinstance(error, RankError))
    except OSError as error:
        if disk_fault(error) is None:
            raise
        _stop(str(disk_fault(error)), file, every_rank=True)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _print_error("stopped", "stopped")
        sys.exit(INTERRUPTED_EXIT_CODE)


def _stop(message: str, file: str | None, *, every_rank: bool) -> NoReturn:
    # Every rank has the same error, and one rank per host reports it.
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        line = f"{_rank_prefix() if every_rank else ''}{redacted(message)}"
        if file is not None:
            with contextlib.suppress(OSError), Path(file).open("x", encoding="utf-8") as place:  # the first rank's
                place.write(line)
        _print_error(line, f"error: {line}")
    sys.exit(USER_ERROR_CODE)


def _print_error(error: str, text: str) -> None:
    """Print an error on stderr as text, or with --json as a document on stdout."""
    if wants_json():
        print_document({"error": error})
    else:
        print(text, file=sys.stderr, flush=True)


def _rank_prefix() -> str:
    """Name of this rank before an error that other ranks do not have, on several hosts with its host."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", ranks))
    host = "" if local_ranks == ranks else f" ({socket.gethostname()})"
    return "" if ranks == "1" else f"rank {os.environ.get('RANK')}{host}: "


def read_file(file: str) -> dict[str, Any]:
    """The content of the YAML file that --config names; raise UserError if it is missing or not YAML."""
    return parse_yaml(read_text(file, "--config must name a file"), file)


def command(
    config_type: type[ConfigT], *, positional: str | Sequence[str] = (), is_rank: bool = False
) -> Callable[[Callable[[ConfigT], None]], Callable[..., None]]:
    """Decorator that makes a function of a config the function `main` of a command.

    It takes the words of the command line (none: those of the process) and `prog`, the name that --help shows, parses
    them, and ends with exit code 2 and one line for a user's mistake. Commands import torch after parsing.

    Args:
        config_type: the settings.
        positional: keys whose values the first words may give without their names.
        is_rank: as in `user_errors`.
    """

    def decorate(run: Callable[[ConfigT], None]) -> Callable[..., None]:
        def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
            with user_errors(is_rank=is_rank), contextlib.nullcontext() if is_rank else log_to_stderr():
                run(parse_config(config_type, argv, prog=prog, positional=positional))

        return main

    return decorate
