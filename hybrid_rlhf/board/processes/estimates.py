"""Memory and speed of a form's settings, by `hybrid-rlhf plan` in a separate process, as planning imports torch.

One plan is made at a time. A newer request ends the process of the previous one, whose settings the user has changed.
"""

from __future__ import annotations

import json
import subprocess  # for types  # nosec B404
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from hybrid_rlhf.board.processes.commands import end_process, json_command, read_result
from hybrid_rlhf.board.processes.form import read_form
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import plain

_MOST_KEPT = 64
_SECONDS = 180.0


class Estimates:
    """Plans of settings, cached."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._newest: object = None

    def of_form(self, command: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """POST /api/form/estimate: the error of the values, or their plan."""
        try:
            form = read_form(command, values)
            if form.config.model.path is None:
                raise UserError("model.path must name the model to start from, got none: give one")
            return {"problem": None, **self.plan(command, plain(form.config), form.processes)}
        except UserError as error:
            return {"problem": str(error), "memory": [], "step_seconds": None}

    def plan(self, command: str, settings: Mapping[str, Any], processes: int) -> dict[str, Any]:
        """Memory of each phase, and seconds per step of RL if the machine was calibrated.

        Raises:
            UserError: if the settings cannot be planned, or a newer request arrived.
        """
        key = json.dumps([command, settings, processes], sort_keys=True, default=str)
        me = self._newest = object()
        with self._lock:
            if key in self._known:
                return self._known[key]
            if self._process is not None:
                end_process(self._process)
        with self._turn:
            if self._newest is not me:
                raise UserError("the settings have changed: ask again")
            plan = _plan(self._run(command, settings, processes))
        with self._lock:
            self._known[key] = plan
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return plan

    def close(self) -> None:
        """End the running plan."""
        self._newest = None
        with self._lock:
            if self._process is not None:
                end_process(self._process)

    def _run(self, command: str, settings: Mapping[str, Any], processes: int) -> dict[str, Any]:
        with json_command("plan", {"steps": command, "ranks": processes, command: dict(settings)}) as process:
            with self._lock:
                self._process = process
            try:
                output, errors = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                end_process(process)
                raise UserError(f"a plan takes at most {_SECONDS:.0f} s, this one took longer: try again") from None
            finally:
                with self._lock:
                    self._process = None
        if process.returncode < 0:
            raise UserError("the settings have changed: ask again")
        lines = errors.decode(errors="replace").strip().splitlines()
        return read_result(output, (lines or ["the plan has no result"])[-1].removeprefix("error: "))


def _plan(document: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plan that the board shows."""
    memory = [
        {"phase": phase["phase"], "gib": phase["total"] / 2**30, "fits": phase["fits"]} for phase in document["memory"]
    ]
    plans = (document.get("rl") or {}).get("plans", [])
    seconds = next((plan["step_seconds"] for plan in plans if plan.get("fits") and "step_seconds" in plan), None)
    return {"memory": memory, "step_seconds": seconds}
