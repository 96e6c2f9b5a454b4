"""The content of a report as JSON: from the run folder, the config and this process."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from hybrid_rlhf.configs.parsing.building import settings_and_defaults
from hybrid_rlhf.configs.sections.run import StepConfig
from hybrid_rlhf.loop.advice.advisor import findings
from hybrid_rlhf.loop.advice.curves import Curves
from hybrid_rlhf.loop.report.charts import thinned
from hybrid_rlhf.loop.report.memory import memory_by_phase
from hybrid_rlhf.loop.report.samples import first_and_last_samples
from hybrid_rlhf.runtime.environment import device_name, git_revision, versions
from hybrid_rlhf.runtime.observability.alerts import Ending
from hybrid_rlhf.runtime.observability.metrics import METRICS_FILE, read_metrics
from hybrid_rlhf.runtime.observability.samples import SAMPLES_FILE
from hybrid_rlhf.runtime.run import CONFIG_FILE, DATA_FILE, Run

FORMAT = 1
_MAX_POINTS = 2000
"""Largest number of points of a curve in report.json."""
_FILES = (CONFIG_FILE, METRICS_FILE, SAMPLES_FILE, "log.txt")
_FASTEST = ("perf/tokens_per_second", "perf/generation_tokens_per_second", "perf/train_tokens_per_second", "perf/mfu")


def collect(run: Run, ending: Ending) -> dict[str, Any]:
    """The report of a run that ends now, as JSON without NaN."""
    lines = read_metrics(run.folder)
    curves = Curves()
    for line in lines:
        curves.add(line["step"], line)
    data = run.folder / DATA_FILE
    return {
        "format": FORMAT,
        "run": {
            "name": run.folder.resolve().name,
            "title": _title(run.config),
            "end_state": ending.end_state,
            "reason": ending.text,
            "place": ending.place,
            "step": curves.step,
            "seconds": lines[-1]["time_seconds"] if lines else 0.0,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "resumed": run.checkpoint is not None,
            "ranks": run.world.size,
            "device": device_name(run.world.device),
        },
        "advice": [asdict(finding) for finding in findings(lines)],
        "curves": {name: thinned(curves.points(name), _MAX_POINTS) for name in curves.names},
        "samples": first_and_last_samples(run.folder / SAMPLES_FILE),
        "data": json.loads(data.read_text()) if data.exists() else None,
        "time": _times(curves),
        "speed": {name: statistics.median(curves.last(name, 1000)) for name in _FASTEST if curves.count(name)},
        "memory": {
            "peak_gib": max(curves.last("memory/peak_gib", 10**9), default=None),
            "phases": memory_by_phase(run),
        },
        "settings": _settings(run.config),
        "versions": versions(),
        "git": git_revision(),
        "files": [name for name in _FILES if (run.folder / name).exists()],
    }


def _title(config: StepConfig) -> str:
    """Title such as `RL, ppo`."""
    kind = type(config).__name__.removesuffix("Config").removesuffix("Step")
    algorithm = getattr(getattr(config, "algorithm", None), "name", None)
    return kind if algorithm is None else f"{kind}, {algorithm}"


def _settings(config: StepConfig) -> list[dict[str, Any]]:
    """All settings; those that differ from their defaults come first."""
    rows = [
        {"key": key, "value": value, "default": default, "changed": value != default}
        for key, (value, default) in settings_and_defaults(config).items()
    ]
    return sorted(rows, key=lambda row: (not row["changed"], row["key"]))


def _times(curves: Curves) -> list[dict[str, Any]]:
    """Mean seconds of each phase of a step, and its share of the step."""
    phases = {
        name.removeprefix("time/").removesuffix("_seconds"): [value for _, value in curves.points(name)]
        for name in curves.names
        if name.startswith("time/") and name.endswith("_seconds")
    }
    whole = sum(phases.get("step", ())) or sum(map(sum, phases.values()))
    return [
        {
            "phase": phase,
            "mean_seconds": statistics.fmean(seconds),
            "share": sum(seconds) / whole if whole else 0.0,
        }
        for phase, seconds in sorted(phases.items(), key=lambda item: -sum(item[1]))
    ]
