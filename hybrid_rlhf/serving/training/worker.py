"""The task that feeds the training engine: commands in their order, packed batches, and models that come and go.

The task runs on the event loop; what the engine does, and what is written to disk with it, one thread runs in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.serving.training.futures import CommandFailed
from hybrid_rlhf.serving.training.queue import BACKWARD, Command, CommandQueue, Model, TakenRow
from hybrid_rlhf.serving.training.rows import forward_backward_answer
from hybrid_rlhf.serving.training.sessions import Sessions
from hybrid_rlhf.serving.training.states import ModelStates

ResultT = TypeVar("ResultT")
_SWEEP_SECONDS = 10.0


class EngineWorker:
    """Runs the commands of all models. Used on the event loop only."""

    def __init__(self, queue: CommandQueue, states: ModelStates, sessions: Sessions, *, session_seconds: float) -> None:
        """Take what it works on.

        Args:
            queue: the commands that wait.
            states: what a command does.
            sessions: the clients.
            session_seconds: time without a heartbeat or a command after which the models of a session leave the engine.
        """
        self._queue = queue
        self._states = states
        self._sessions = sessions
        self._session_seconds = session_seconds
        self._metrics = states.metrics
        self._wake = asyncio.Event()
        self._next_sweep = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")

    def add(self, seq: int, command: Command) -> None:
        """Add a command to its model, which is known from now on."""
        model = command.model
        self._queue.models[model.run.run_id] = model
        model.waiting[seq] = command
        self._wake.set()

    def sweep_soon(self) -> None:
        """Remove unused models from the engine as soon as possible."""
        self._next_sweep = 0.0
        self._wake.set()

    async def on_engine(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """The result of a function that the engine's thread calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """End the engine's thread after what it does now."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def work(self) -> None:
        """Feed the engine, until cancelled."""
        while True:
            is_idle = not await self._turn()
            if time.monotonic() >= self._next_sweep:  # also while there is always something to do
                self._next_sweep = time.monotonic() + _SWEEP_SECONDS
                await self._sweep()
            if is_idle:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _SWEEP_SECONDS)
                self._wake.clear()

    async def _turn(self) -> bool:
        """Run one command of each model, and one packed batch; False if there was nothing to do."""
        absent = self._queue.heads(ready=False)
        for command in absent:
            await self._bring_in(command)
        runs = self._queue.next_runs()
        for command in runs:
            await self._run(command)
        rows = self._queue.next_rows()
        if rows:
            await self._compute(rows)
        return bool(absent or runs or rows)

    # -- commands

    async def _bring_in(self, command: Command) -> None:
        model = command.model
        tenant = model.tenant
        most = tenant.quotas.models
        try:
            if self._queue.models_of(tenant) >= most:
                raise UserError(
                    f"key {tenant.name} may have {most} models in training: unload one, or finish the session of one"
                )
            await self.on_engine(self._states.bring_in, model)
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            command.future.fail_with(error, command.name)
            await self._leave(model)

    async def _run(self, command: Command) -> None:
        assert command.run is not None
        model = command.model
        try:
            command.future.finish(await self.on_engine(command.run, model, model.next_seq))
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            command.future.fail_with(error, command.name)
            if command.name == BACKWARD:  # refused, as others have rows
                model.broken = _reason(error)
        model.end()
        if model.run.run_id not in self._states.store.runs:  # it was not made
            await self._leave(model)

    async def _compute(self, rows: list[TakenRow]) -> None:
        """Compute a packed batch. If that fails, its commands are computed one by one, and those that fail alone are
        at fault."""
        start = time.perf_counter()
        error = await self._compute_together(rows)
        if error is not None:
            commands = list(dict.fromkeys(command for command, _ in rows))
            for command in commands:
                if len(commands) > 1:
                    error = await self._compute_together([taken for taken in rows if taken[0] is command])
                if error is not None:
                    _break(command, error)
        self._metrics.batch_seconds.observe(time.perf_counter() - start)
        self._metrics.batch_models.observe(len({command.model for command, _ in rows}))

    async def _compute_together(self, rows: list[TakenRow]) -> Exception | None:
        """Compute rows as one packed batch; returns why the engine could not."""
        try:
            results = await self.on_engine(self._states.engine.forward_backward, [row.row for _, row in rows])
        except Exception as error:  # noqa: BLE001 - reported to the client; the server keeps running
            commands = len({command for command, _ in rows})
            logger.error("a packed batch of %d commands has failed", commands, exc_info=error)
            return error
        for (command, row), result in zip(rows, results, strict=True):
            model = command.model
            model.has_gradient |= command.name == BACKWARD
            command.results.append(result)
            self._metrics.trained_tokens.labels(model.tenant.name).inc(row.tokens)
            if len(command.results) == len(command.rows):
                try:
                    answer = forward_backward_answer(command)
                except Exception as error:  # noqa: BLE001 - as above; its gradient must not be computed again
                    logger.error("the answer of a command has failed", exc_info=error)
                    _break(command, error)
                else:
                    command.future.finish(answer)
                    model.end()
        return None

    # -- models that leave

    async def _sweep(self) -> None:
        """Remove models whose session has finished or had no activity for long; delete what has expired."""
        models = self._queue.models
        for model in list(models.values()):
            over = self._sessions.is_silent(model.run.session_id, self._session_seconds)
            # after its session has ended, nobody sends the commands that are missing before those that wait
            idle = model.head is None if over else not model.waiting
            if (over or model.leaving) and idle:
                await self._leave(model)
        for session_id in self._sessions.forget({model.run.session_id for model in models.values()}):
            try:
                await self.on_engine(self._states.store.end_session, session_id)
            except OSError as error:
                logger.warning("cannot delete what the session %s had: %s", session_id, error)
        await self.on_engine(self._states.store.expire)

    async def _leave(self, model: Model) -> None:
        """Remove a model from the engine; commands that wait for it fail. One that arrives in the meantime starts from
        the saved state."""
        del self._queue.models[model.run.run_id]
        if model.ready:
            await self.on_engine(self._states.engine.remove, model.run.run_id)
        for future in model.leaving:
            future.finish({"model_id": model.run.run_id, "type": "unload_model"})
        for command in model.waiting.values():
            command.future.fail("the model has been unloaded, or was never made", by_user=True)


def _break(command: Command, error: Exception) -> None:
    """Fail a command whose rows cannot be computed; the step that their gradient is for is left out too."""
    reason = _reason(error)
    command.future.fail(f"forward_backward has failed: {reason}", by_user=isinstance(reason, UserError))
    if command.name == BACKWARD:
        command.model.broken = reason
    command.model.end()


def _reason(error: Exception) -> UserError | CommandFailed:
    """The error as the client receives it."""
    if isinstance(error, UserError):
        return error
    return CommandFailed(f"{type(error).__name__}: the log of the server tells why")
