"""Tasks of Inspect AI on a saved model, which Inspect queries over HTTP like any server of OpenAI's API.

With HTTP, agents, tools and scorers of Inspect work unchanged, and requests of all samples share one batch.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import inspect_ai
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, get_model

from hybrid_rlhf.cli.saved_models.evaluation.results import Z95, Estimate, Measurement
from hybrid_rlhf.cli.saved_models.loading import Place, engine_at
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.serving.app import Access, build_app
from hybrid_rlhf.serving.service import Service
from hybrid_rlhf.serving.web import served_in_background

_NAME = "model"
_ROWS = 32
"""Number of completions decoded together, and of concurrent requests from Inspect."""


def inspect_tasks(config: EvaluateConfig, place: Place) -> Measurement:
    """Run tasks; intervals come from Inspect's standard errors.

    Raises:
        UserError: when there is no such task, or it fails.
    """
    engine = engine_at(place, kv_cache_gib=None)
    key = secrets.token_urlsafe(24)
    sampling = replace(config.sampling, n=1, seed=None)
    try:
        with engine.open(rows=_ROWS, max_tokens=config.max_length + sampling.max_new_tokens) as batch:
            service = Service(batch, place.tokenizer, name=_NAME, sampling=sampling, max_queue=sys.maxsize)
            app = build_app(service, Access(api_key=key), created=int(time.time()))
            with served_in_background(app) as url:
                logs = _run(config, f"{url}/v1", key)
    finally:
        engine.close()
    values: dict[str, Estimate | float | int] = {}
    for log in logs:
        values |= _values(log)
    return Measurement("Inspect", values)


def _run(config: EvaluateConfig, url: str, key: str) -> Sequence[EvalLog]:
    with tempfile.TemporaryDirectory() as folder:
        settings = GenerateConfig(seed=config.seed, max_connections=_ROWS)
        model = get_model(f"openai-api/hybrid/{_NAME}", base_url=url, api_key=key, config=settings, memoize=False)
        try:
            logs = inspect_ai.eval(
                list(config.inspect_tasks),
                model=model,
                limit=config.max_rows,
                log_dir=folder,
                display="none",
                log_level="error",
            )
        except Exception as error:  # noqa: BLE001 - errors of the task's code, or of loading it
            raise UserError(
                f"tasks of Inspect must load, one of {', '.join(config.inspect_tasks)} does not ({first_line(error)}): "
                "check it"
            ) from error
    failed = next((log for log in logs if log.status != "success"), None)
    if failed is not None or not logs:
        name = ", ".join(config.inspect_tasks) if failed is None else failed.eval.task
        reason = "no task was found" if failed is None else _reason(failed)
        raise UserError(f"tasks of Inspect must run to their ends, {name} does not ({reason}): check it")
    return logs


def _reason(failed: EvalLog) -> str:
    """Why a task did not complete, in one line."""
    message = "" if failed.error is None else failed.error.message.strip()
    return message.partition("\n")[0].rstrip() or f"its status is {failed.status}"


def _values(log: EvalLog) -> dict[str, Estimate | float | int]:
    """The metrics of a task, and the number of its samples."""
    assert log.results is not None
    values: dict[str, Estimate | float | int] = {f"{log.eval.task} rows": log.results.completed_samples}
    for score in log.results.scores:
        metrics = {name: float(metric.value) for name, metric in score.metrics.items()}
        spread = Z95 * metrics.get("stderr", 0.0)
        for name, value in metrics.items():
            if name == "stderr":
                continue
            is_mean = spread and name in ("accuracy", "mean")  # Inspect's standard error belongs to these
            shown = Estimate(value, value - spread, value + spread) if is_mean else value
            values[f"{log.eval.task} {score.name} {name}"] = shown
    return values
