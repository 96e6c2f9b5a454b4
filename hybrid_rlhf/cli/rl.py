"""`hybrid-rlhf rl`: step 3, PPO and other RL algorithms, in this process or under a launcher.

With `--adapters` it trains several runs together on one base.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import is_first_rank, parse_config, read_file, user_errors
from hybrid_rlhf.runtime.output import print_document, wants_json

_ADAPTERS = "--adapters"
_OPTIONS = {
    f"{_ADAPTERS} FILE.yaml": "Train several runs together, each with an adapter of its own on one base "
    "(docs/adapters.md). The file has the keys of each run by its name, NAME: {KEY: VALUE}; its folder is "
    "output_dir/NAME."
}


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Run the step, and print its run, or its runs."""
    words = list(sys.argv[1:] if argv is None else argv)
    with user_errors(is_rank=True):
        file, words = take_adapters(words)
        if file is None:
            _run(parse_config(RLConfig, words, prog=prog, options=_OPTIONS))
        else:
            _run_together(file, words, prog)


def _run(config: RLConfig) -> None:
    from hybrid_rlhf.cli.train import print_run
    from hybrid_rlhf.rl.build import run_rl

    run_rl(config)
    print_run(config.output_dir)


def _run_together(file: str, words: Sequence[str], prog: str | None) -> None:
    from hybrid_rlhf.configs.adapter_runs import DEFAULTS, check_runs, read_runs

    common = parse_config(RLConfig, words, prog=prog, defaults=DEFAULTS, options=_OPTIONS)
    configs = {}
    for name, settings in read_runs(read_file(file, _ADAPTERS), file).items():
        over = [Layer(settings, f"{file}: {name}"), Layer({"output_dir": str(Path(common.output_dir) / name)})]
        configs[name] = parse_config(RLConfig, words, defaults=DEFAULTS, over=over)
    check_runs(configs, file)

    from hybrid_rlhf.cli.train import run_document
    from hybrid_rlhf.rl.adapter_runs import run_together

    run_together(configs)
    if wants_json() and is_first_rank():
        print_document({"runs": {name: run_document(config.output_dir) for name, config in configs.items()}})


def take_adapters(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file of --adapters, and the other words."""
    file = None
    rest = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name != _ADAPTERS:
            rest.append(word)
            continue
        file = value if equals else next(left, None)
        if not file or file.startswith("--"):
            raise UserError(f"{_ADAPTERS} needs a value, got none: write {_ADAPTERS} FILE.yaml")
    return file, rest


if __name__ == "__main__":
    main()
