"""What a training server writes for the board: its settings, and the load and throughput of each tenant.

The board shows the server's folder as it shows a run's. A step is an interval of `INTERVAL_SECONDS` in which requests
were accepted, waited or were computed; intervals without any add no line.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.runtime.command_line import save_config
from hybrid_rlhf.runtime.files.disk import kept_if_full
from hybrid_rlhf.runtime.files.names import CONFIG_FILE
from hybrid_rlhf.runtime.observability.metrics import MetricsWriter, read_metrics
from hybrid_rlhf.serving.training.metrics import TrainingMetrics
from hybrid_rlhf.serving.training.tenants import Tenant, Tenants

INTERVAL_SECONDS = 10.0
_GIB = 2**30
_TOKENS = ("trained_tokens", "sampled_tokens")


def write_settings(config: TrainServerConfig, folder: Path) -> None:
    """Write the settings; a key that is not the name of an environment variable is left out. On a full disk, those of
    an earlier start stay: a server is needed to delete checkpoints."""
    names = {name: key if key.startswith("${") else f"${{KEY_OF_{name}}}" for name, key in config.api_keys.items()}
    with kept_if_full(folder / CONFIG_FILE):
        save_config(replace(config, api_keys=names), folder / CONFIG_FILE)


class ServiceRecord:
    """The lines of a server's metrics.jsonl, which continue after a restart."""

    def __init__(self, folder: Path, tenants: Tenants, metrics: TrainingMetrics) -> None:
        """Take the folder, the tenants, and what is counted of them."""
        lines = read_metrics(folder)
        self._step = int(lines[-1]["step"]) if lines else 0
        self._writer = MetricsWriter(folder, resumed_step=self._step)
        self._tenants = tenants
        self._metrics = metrics
        self._time = time.monotonic()
        self._counts = {tenant.name: self._counts_of(tenant) for tenant in tenants}

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
        totals = Counter[str]()
        for tenant in self._tenants:
            name = tenant.name
            counts = self._counts_of(tenant)
            new = {kind: value - self._counts[name][kind] for kind, value in counts.items()}
            self._counts[name] = counts
            queued = {kind: self._metrics.value(kind, name) for kind in ("waiting_tokens", "requests_in_flight")}
            values = {
                **queued,
                **{f"{kind}_per_second": count / seconds for kind, count in new.items()},
                "models": self._metrics.value("models", name),
                "stored_gib": self._metrics.value("stored_bytes", name) / _GIB,
            }
            line |= {f"tenants/{name}/{key}": value for key, value in values.items()}
            totals.update(queued | new)  # type: ignore[arg-type]  # floats
        if not any(totals.values()):
            return
        self._step += 1
        queue = {f"queue/{kind}": totals[kind] for kind in ("waiting_tokens", "requests_in_flight")}
        rates = {f"perf/{kind}_per_second": totals[kind] / seconds for kind in _TOKENS}
        self._writer.write(self._step, {**queue, **rates, **line})

    def _counts_of(self, tenant: Tenant) -> dict[str, float]:
        tokens = {kind: self._metrics.value(f"{kind}_total", tenant.name) for kind in _TOKENS}
        return {"requests": tenant.accepted, **tokens}
