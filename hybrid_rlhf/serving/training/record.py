"""What a training server writes for the board: its settings, and the load and throughput of each tenant.

The board shows the server's folder as it shows a run's. A step is an interval of `INTERVAL_SECONDS` in which requests
were accepted, waited or were computed; intervals without any add no line.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.runtime.command_line import save_config
from hybrid_rlhf.runtime.files.names import CONFIG_FILE
from hybrid_rlhf.runtime.observability.metrics import MetricsWriter, read_metrics
from hybrid_rlhf.serving.training.metrics import TrainingMetrics
from hybrid_rlhf.serving.training.tenants import Tenants

INTERVAL_SECONDS = 10.0
_GIB = 2**30


def write_settings(config: TrainServerConfig, folder: Path) -> None:
    """Write the settings; a key that is not the name of an environment variable is left out."""
    names = {name: key if key.startswith("${") else f"${{KEY_OF_{name}}}" for name, key in config.api_keys.items()}
    save_config(replace(config, api_keys=names), folder / CONFIG_FILE)


class ServiceRecord:
    """The lines of a server's metrics.jsonl, which continue after a restart."""

    def __init__(self, folder: Path, tenants: Tenants, metrics: TrainingMetrics) -> None:
        """Take the folder, the tenants, and what is counted of them."""
        lines = read_metrics(folder)
        self._step = int(lines[-1]["step"]) if lines else 0
        seconds = float(lines[-1]["time_seconds"]) if lines else 0.0
        self._writer = MetricsWriter(folder, resumed_step=self._step, start_seconds=seconds)
        self._tenants = tenants
        self._metrics = metrics
        self._time = time.monotonic()
        self._counts = {tenant.name: self._counts_of(tenant.name) for tenant in tenants}
        self._accepted = {tenant.name: tenant.accepted for tenant in tenants}

    async def follow(self, interval: float = INTERVAL_SECONDS) -> None:
        """Add lines, until cancelled. Runs on the event loop, which the values belong to."""
        try:
            while True:
                await asyncio.sleep(interval)
                self.add_line()
        finally:
            self.add_line()
            self._writer.close()

    def add_line(self) -> None:
        """Add the line of the time since the last call, unless nothing has happened in it."""
        now = time.monotonic()
        seconds = now - self._time
        self._time = now
        line: dict[str, float] = {}
        totals = {"trained_tokens": 0.0, "sampled_tokens": 0.0}
        waiting = in_flight = accepted = 0.0
        for tenant in self._tenants:
            name = tenant.name
            counts = self._counts_of(name)
            new = {kind: value - self._counts[name][kind] for kind, value in counts.items()}
            self._counts[name] = counts
            requests = tenant.accepted - self._accepted[name]
            self._accepted[name] = tenant.accepted
            values = {
                "waiting_tokens": self._metrics.value("waiting_tokens", name),
                "requests_in_flight": self._metrics.value("requests_in_flight", name),
                "requests_per_second": requests / seconds,
                "trained_tokens_per_second": new["trained_tokens"] / seconds,
                "sampled_tokens_per_second": new["sampled_tokens"] / seconds,
                "models": self._metrics.value("models", name),
                "stored_gib": self._metrics.value("stored_bytes", name) / _GIB,
            }
            line |= {f"tenants/{name}/{key}": value for key, value in values.items()}
            waiting += values["waiting_tokens"]
            in_flight += values["requests_in_flight"]
            accepted += requests
            for kind in totals:
                totals[kind] += new[kind]
        if not (waiting or in_flight or accepted or any(totals.values())):
            return
        self._step += 1
        queue = {"queue/waiting_tokens": waiting, "queue/requests_in_flight": in_flight}
        rates = {f"perf/{kind}_per_second": count / seconds for kind, count in totals.items()}
        self._writer.write(self._step, {**queue, **rates, **line})

    def _counts_of(self, name: str) -> dict[str, float]:
        return {kind: self._metrics.value(f"{kind}_total", name) for kind in ("trained_tokens", "sampled_tokens")}
