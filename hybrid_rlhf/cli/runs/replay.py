"""`hybrid-rlhf replay RUN --step S --index I`: samples of an RL run, generated again and compared.

The command reads the records of the run and starts the same number of ranks, each with this module and the option
`scratch`. They write the result into that folder, and the command prints it: exit code 1 if a sample differs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hybrid_rlhf.cli.runs.processes import launcher, tee
from hybrid_rlhf.configs.commands.replay import ReplayConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import LauncherConfig
from hybrid_rlhf.runtime.command_line import command, is_first_rank, save_config
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.output import print_result

_MODULE = "hybrid_rlhf.cli.runs.replay"
_RESULT = "result.json"


@command(ReplayConfig, positional="path", is_rank=True)
def main(config: ReplayConfig) -> None:
    """Start the ranks and print their result, or run as one of them."""
    if config.scratch is None:
        _replay(config)
    else:
        _be_a_rank(config, Path(config.scratch))


def _replay(config: ReplayConfig) -> None:
    """Start the ranks, wait for their result and print it."""
    from hybrid_rlhf.rl.replay.recorded import RecordedStep, require_in_completion, require_one_turn

    recorded = RecordedStep.read(Path(config.path), config.step)
    for index in config.index:
        recorded.sample(index)
    if config.branch is not None:
        require_one_turn(recorded.config)
        if (record := recorded.tokens(config.index[0])) is not None:
            require_in_completion(record, config.branch.token)
    ranks = 1 if config.rescore is not None else recorded.ranks
    with tempfile.TemporaryDirectory(prefix="hybrid_rlhf_replay_") as folder:
        scratch = Path(folder)
        settings = scratch / "replay.yaml"
        save_config(dataclasses.replace(config, scratch=folder), settings)
        line = [*launcher(LauncherConfig(num_processes=ranks)), _MODULE, "--config", str(settings)]
        code = tee(line, scratch / "log.txt", recorded.environment).code
        if not (scratch / _RESULT).exists():
            error = f"the replay ended with exit code {code} and no result, see the lines above"
            print_result({"error": error}, f"error: {error}")
            sys.exit(code or 1)
        result = json.loads((scratch / _RESULT).read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(result["error"])
    print_result(result, "\n".join(_lines(config, result)))
    sys.exit(0 if result.get("identical", True) else 1)


def _be_a_rank(config: ReplayConfig, scratch: Path) -> None:
    """Compute the result; the first rank writes it. A user's mistake is also a result, which the command reports."""
    is_main = is_first_rank()
    try:
        result = _result(config, scratch)
    except UserError as error:
        if not is_main:
            raise
        write_whole(scratch / _RESULT, json.dumps({"error": str(error)}))
        sys.exit(2)
    if is_main:
        write_whole(scratch / _RESULT, json.dumps(result))


def _result(config: ReplayConfig, scratch: Path) -> dict[str, Any]:
    """The result of the command as a JSON object. Every rank calls."""
    from hybrid_rlhf.planning.automatic import choose_placement
    from hybrid_rlhf.rl.replay.branching import branch
    from hybrid_rlhf.rl.replay.recorded import RecordedStep
    from hybrid_rlhf.rl.replay.replaying import replayed_step
    from hybrid_rlhf.rl.replay.rescoring import rescore

    recorded = RecordedStep.read(Path(config.path), config.step)
    run = scratch / "run"
    if config.rescore is not None:
        return dataclasses.asdict(rescore(recorded, config.index[0], config.rescore.completion, run))
    with replayed_step(recorded, run, choose_placement=choose_placement) as replayed:
        samples = [replayed.sample(index) for index in config.index or range(len(recorded.rows))]
        identical = all(sample.identical for sample in samples)
        if config.branch is not None:
            branches = branch(replayed, config.index[0], **dataclasses.asdict(config.branch))
            completions = [
                {**dataclasses.asdict(continuation), **dataclasses.asdict(continuation.score)}
                for continuation in branches
            ]
            return {"completions": completions, "identical": identical}
    if len(config.index) == 1:
        return dataclasses.asdict(samples[0])
    return {"identical": identical, "samples": [dataclasses.asdict(sample) for sample in samples]}


def _lines(config: ReplayConfig, result: dict[str, Any]) -> list[str]:
    """The result as text."""
    if config.rescore is not None:
        parts = (f"{name} {value}" for name, value in result["components"].items())
        return [f"score {result['score']}  ({', '.join(parts)})"]
    if "completions" in result:
        lines = [
            f"{number}: score {completion['score']}  {completion['text']!r}"
            for number, completion in enumerate(result["completions"])
        ]
        return lines + ["the sample itself is not identical when it is replayed"] * (not result["identical"])
    samples = result.get("samples", [result])
    differing = [sample for sample in samples if not sample["identical"]]
    lines = [
        f"sample {sample['index']} differs from {'token' if sample['compared'] == 'tokens' else 'character'} "
        f"{sample['first_difference']} on"
        for sample in differing
    ]
    same = len(samples) - len(differing)
    shown = [repr(samples[0]["text"])] if len(samples) == 1 else []
    compared = {"tokens": "tokens and log-probs", "text": "texts, as the step has no token record"}[
        samples[0]["compared"]
    ]
    return [*shown, *lines, f"{same} of {len(samples)} samples of step {config.step} are identical ({compared})"]


if __name__ == "__main__":
    main()
