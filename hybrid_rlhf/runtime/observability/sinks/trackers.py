"""Experiment trackers: Weights & Biases, MLflow, Trackio.

Each reads its own environment variables (WANDB_API_KEY, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID, ...), which determine
whether metrics leave the machine. A resumed run continues the run of its id; trackers cannot drop steps, so they have
the steps after the checkpoint twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from hybrid_rlhf.runtime.observability.sinks.sink import EndState, MetricsSink, TrackedRun

_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "stalled": "FAILED"}
# Limits of MLflow's server.
_MLFLOW_LONGEST_PARAM = 6000
_MLFLOW_PARAMS_PER_CALL = 100
_STEP = "step"
_LOGIN_SECONDS = 1.0


class WandbSink(MetricsSink):
    """A run of Weights & Biases; its files are in the folder wandb of the run folder."""

    module = "wandb"
    title = "Weights & Biases"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        # Without a key, W&B would ask for one on the terminal, in the middle of the run.
        wandb.setup(wandb.Settings(login_timeout=_LOGIN_SECONDS))
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.params),
            settings=settings,
        )
        if self._run.disabled and os.environ.get("WANDB_MODE") != "disabled":
            raise RuntimeError("there is no API key: run wandb login, or set WANDB_API_KEY or WANDB_MODE=offline")
        self.run_id = self._run.id
        # W&B's own step only increases; W&B would discard the steps that a resumed run writes again.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics with the step as a metric."""
        self._run.log({_STEP: step, **metrics})

    def close(self, end_state: EndState) -> None:
        """Finish the run, with exit code 0 if it has finished."""
        self._run.finish(exit_code=0 if end_state == "finished" else 1)


class MlflowSink(MetricsSink):
    """A run of MLflow, in the experiment named by the project."""

    module = "mlflow"
    title = "MLflow"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if run.run_id is not None:
            self.run_id = self._id = run.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if existing is None else existing.experiment_id
        self.run_id = self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        params = [Param(key, str(value)[:_MLFLOW_LONGEST_PARAM]) for key, value in run.params.items()]
        for start in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[start : start + _MLFLOW_PARAMS_PER_CALL])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics as one batch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    def close(self, end_state: EndState) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._id, status=_MLFLOW_STATUS[end_state])


class TrackioSink(MetricsSink):
    """A run of Trackio; its database is on this machine unless TRACKIO_SPACE_ID names a Space."""

    module = "trackio"
    title = "Trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = run.run_id or run.name
        self._run = trackio.init(
            project=run.project, name=name, config=dict(run.params), resume="must" if run.run_id else "never"
        )
        self.run_id = self._run.name

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the step."""
        self._run.log(dict(metrics), step=step)

    def close(self, end_state: EndState) -> None:
        """Finish the run."""
        self._run.finish()
