"""Adapters and weights that change while a server runs.

A replaced adapter keeps its number until no request uses it, so running requests keep their version. Weights have one
place: requests that arrive wait until the running ones have finished and the new weights are there. Each answer has the
version in `system_fingerprint`. The adapter of a run that is followed has the name of the model: requests for the model
are answered with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.open_batch import OpenBatch
from hybrid_rlhf.models.pretrained.adapters import LowRank, read_adapter
from hybrid_rlhf.runtime.files.checkpoint_folder import BrokenCheckpoint, newest_valid
from hybrid_rlhf.runtime.files.reading import user_path
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.serving.bodies import KeyRejected
from hybrid_rlhf.serving.followed_run import read_trained
from hybrid_rlhf.serving.service import Service, UnknownModel

_POLL_SECONDS = 0.05
"""Time between two looks at the running requests before weights are replaced."""


class ModelUpdates:
    """Changes of a served model, one at a time."""

    def __init__(
        self,
        service: Service,
        engine: GenerationEngine,
        batch: OpenBatch,
        load: Callable[[], PreTrainedModel],
        *,
        adapters_from: str | None = None,
    ) -> None:
        """Take the service and its engine.

        Args:
            service: the service of the model.
            engine: its engine.
            batch: the open batch of both.
            load: loads the model on the host; adapters are read with it, and weights into it.
            adapters_from: folder of the adapters that requests may load; None: none may be loaded.
        """
        self._service = service
        self._engine = engine
        self._batch = batch
        self._load = load
        self._adapters_from = adapters_from
        self._changing = asyncio.Lock()
        self._retired: dict[str, Service] = {}
        """Services of adapters that were replaced or unloaded, by their names in the engine."""
        self._versions = 0

    async def load_adapter(self, name: str, folder: str) -> Service:
        """Load an adapter, or replace the one of this name, for requests that begin after the call.

        Raises:
            UserError: for a name that the model has, and for a folder without an adapter of this model.
        """
        if name == self._service.name:
            raise KeyRejected("name", f"must be another one than the model's, got {name}: choose another")
        path = self._path_of(folder)
        async with self._changing:
            lm = await asyncio.to_thread(self._load)
            try:
                factors = await asyncio.to_thread(read_adapter, lm, str(path))
            except UserError as error:  # its text names a folder of the server
                raise KeyRejected(
                    "path", f"must be an adapter of the model: {error}".replace(str(path), folder)
                ) from error
            return await self._take(name, factors, lm, version=f"{folder}@{self._versions + 1}")

    async def _take(self, name: str, factors: Mapping[str, LowRank], lm: PreTrainedModel, *, version: str) -> Service:
        """Serve an adapter under a name in place of the one that has it; `lm` has the shapes of the weights."""
        await self._free(lm)
        self._versions += 1
        inner = f"{name}@{self._versions}"
        await self._paused(partial(self._engine.set_adapter, inner, factors, like=lm))
        self._retire(name)
        served = self._service.with_adapter(name, inner, version=version)
        self._service.adapters[name] = served
        return served

    async def unload_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter, whose running requests finish.

        Raises:
            UnknownModel: when there is no such adapter.
        """
        names = self._service.adapters.keys() - {self._service.name}
        if name not in names:
            raise UnknownModel(f"the adapters of this server are {', '.join(sorted(names)) or 'none'}")
        async with self._changing:
            self._retire(name)
            await self._free(await asyncio.to_thread(self._load))

    def _retire(self, name: str) -> None:
        old = self._service.adapters.pop(name, None)
        if old is not None and old.adapter is not None:
            self._retired[old.adapter] = old

    async def _free(self, lm: PreTrainedModel) -> None:
        """Release the memory of retired adapters that no request uses any more."""
        unused = [inner for inner, service in self._retired.items() if not service.running]
        if unused:
            await self._paused(partial(self._engine.remove_adapters, unused, like=lm))
            for inner in unused:
                del self._retired[inner]

    async def _paused(self, change: Callable[[], None]) -> None:
        """Make a change between two steps of the batch."""

        def make() -> None:
            with self._batch.paused():
                change()

        await asyncio.to_thread(make)

    def _path_of(self, folder: str) -> Path:
        """The folder of an adapter, which lies in that of the server's settings."""
        if self._adapters_from is None:
            raise UserError("adapters are loaded from a folder that the server allows, it has none: --adapters_from")
        root = user_path(self._adapters_from).resolve()
        path = root if "\0" in folder else (root / folder).resolve()  # no path has NUL
        if not path.is_relative_to(root) or path == root:
            raise KeyRejected(
                "path", f"must be a folder in adapters_from of the server, got {folder[:100]!r}: change it"
            )
        return path

    async def replace_weights(self, lm: PreTrainedModel, version: str, number: int) -> None:
        """Take the weights of another model when the running requests have finished; others wait meanwhile."""
        async with self._changing:
            async with self._alone():
                await asyncio.to_thread(self._engine.replace_weights, lm, number, self._batch)
                self._service.version = version

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Context in which no request runs, and those that arrive wait."""
        services = [self._service, *self._service.adapters.values(), *self._retired.values()]
        self._service.admits.clear()
        try:
            while any(service.running for service in services):
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            self._service.admits.set()

    async def follow(self, run: str, seconds: float, report: Callable[[str], None]) -> None:
        """Serve each new checkpoint of a run, until cancelled; looks every `seconds`, and reports what is served."""
        folder = user_path(run)
        last: Path | None = None
        if await asyncio.to_thread(newest_valid, folder) is None:
            report(f"{folder} has no complete checkpoint yet: the model is served as it was loaded")
        while True:
            newest = await asyncio.to_thread(newest_valid, folder)
            if newest is not None and newest != last:
                try:
                    report(f"serving the {await self._take_checkpoint(newest)} of {newest}")
                except (OSError, BrokenCheckpoint, SafetensorError) as error:  # the run has removed it meanwhile
                    logger.warning("%s cannot be read (%s): the next one will be", newest, error)
                except UserError as error:
                    logger.error("%s is not served: %s", newest, error)
                last = newest
            await asyncio.sleep(seconds)

    async def _take_checkpoint(self, checkpoint: Path) -> str:
        """Serve what a run has trained; returns what that is."""
        lm = await asyncio.to_thread(self._load)
        factors = await asyncio.to_thread(read_trained, lm, checkpoint)
        if not factors:
            await self.replace_weights(lm, checkpoint.name, int(checkpoint.name.split("_")[1]))
            return "weights"
        async with self._changing:
            await self._take(self._service.name, factors, lm, version=checkpoint.name)
        return "adapter"
