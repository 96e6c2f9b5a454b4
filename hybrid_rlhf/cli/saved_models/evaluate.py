"""`hybrid-rlhf evaluate MODEL --data FILE`: measure a saved model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.configs.parsing.building import plain
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.files.atomic import output_file, write_whole
from hybrid_rlhf.runtime.observability.logs import LOADING_LIBRARIES, logger
from hybrid_rlhf.runtime.output import print_result

if TYPE_CHECKING:
    from hybrid_rlhf.cli.saved_models.evaluation.results import Measurement


@command(EvaluateConfig, positional="path")
def main(config: EvaluateConfig) -> None:
    """Measure the model, and print the results."""
    logger.info(LOADING_LIBRARIES)
    output = None
    if config.output is not None:
        output = output_file(config.output, "--output", overwrite=config.overwrite)
    measure, results = _measure(config)
    document = _document(config, measure, results)
    if output is not None:
        write_whole(output, json.dumps(document | {"rows": results.rows}, indent=2, ensure_ascii=False) + "\n")
    print_result(document, _text(results))


def _measure(config: EvaluateConfig) -> tuple[str, Measurement]:
    """The name of the chosen measure, and its results."""
    from hybrid_rlhf.cli.saved_models.evaluation import held_out
    from hybrid_rlhf.cli.saved_models.evaluation.pass_rate import pass_rate
    from hybrid_rlhf.cli.saved_models.evaluation.win_rate import win_rate
    from hybrid_rlhf.cli.saved_models.loading import find_model

    if config.chosen == "win_rate":
        return "win_rate", win_rate(config)
    if config.chosen == "pass_rate":
        return "pass_rate", pass_rate(config)
    place = find_model(config)
    name = ("accuracy" if place.scores else "perplexity") if config.chosen == "auto" else config.chosen
    return name, {"accuracy": held_out.accuracy, "perplexity": held_out.perplexity}[name](config, place)


def _document(config: EvaluateConfig, measure: str, results: Measurement) -> dict[str, Any]:
    """The results, with the settings and versions that are needed to repeat them."""
    from hybrid_rlhf.runtime.environment import versions

    values = {
        name: value if isinstance(value, float | int) else asdict(value) for name, value in results.values.items()
    }
    return {
        "measure": measure,
        "model": config.path,
        "results": values,
        "seed": config.seed,
        "settings": plain(config),
        "versions": versions(),
    }


def _text(results: Measurement) -> str:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.capture() as capture:
        console.print(results.table())
    return capture.get().rstrip("\n")
