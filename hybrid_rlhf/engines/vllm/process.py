"""A vLLM server that a rank starts with the interpreter of vLLM's environment.

It listens on a Unix socket in a private folder, because routes that change weights have no password. The server and
what it starts are one process group. A shell waits in the group for the end of a pipe that only this process writes to,
and then ends the group; so the server ends with this process, however that ends. The kernel's parent-death signal would
follow the thread that started the server.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess  # nosec B404
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.generation.backends.vllm import REQUESTS_PER_SERVER, ServerLost, VLLMServer
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.world import without_own_settings

MODEL_NAME = "actor"
"""Name of the model at servers that this library starts."""
_START_SECONDS = 3600.0
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 10.0
_CPU_CACHE_GIB = 4.0
"""Largest default of the KV cache on a CPU; vLLM allocates all of it when it starts."""
_GPU_SHARE = 0.9
"""Share of the free memory of a GPU that vLLM takes by default."""
_UNTIL_THIS_PROCESS_ENDS = """
exec 3<&0
{ trap '' TERM; read -r _ <&3; kill -TERM 0; sleep %d; kill -KILL 0; } > /dev/null 2>&1 &
exec "$@" 3<&- < /dev/null
"""
"""Shell script that runs a command until its input ends."""
_REMOVE_AT_THE_END = 'read -r _; rm -rf -- "$1"'
_LOG_BYTES = 2**18
_ERROR = re.compile(r"\w*(?:[Ee]rror|Exception)\b[^:\n]*: (.+)")
_CONSEQUENCES = ("EngineDead", "EngineCore", "Engine core", "error_type", "WorkerProc", "VllmWorker")
"""Words of errors that only report that another process has failed."""
_NOT_PASSED = re.compile(r"RANK|LOCAL_.*|WORLD_SIZE|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|PYTHON(PATH|HOME)")
"""Variables of this process that are not for the server: a launcher's, and those of this environment."""


def private_folder(parent: str | None = None) -> Path:
    """Return a new folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="hybrid_rlhf-vllm-", dir=parent)
    _guards.append(
        subprocess.Popen(  # a list of arguments  # nosec B603 B607
            ["sh", "-c", _REMOVE_AT_THE_END, "sh", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    return Path(folder)


_guards: list[subprocess.Popen[bytes]] = []
"""Processes that wait for the end of this one; kept so that their pipes stay open."""


def server_command(
    python: str,
    rollout: RolloutConfig,
    *,
    model: Path,
    socket: Path,
    dtype: torch.dtype,
    device: torch.device,
    ranks: int,
    unties: bool = False,
) -> list[str]:
    """Return the command of a server.

    Args:
        python: interpreter of vLLM's environment.
        rollout: settings of sampling.
        model: folder with weights, config and tokenizer.
        socket: path of the Unix socket.
        dtype: dtype of the weights.
        device: device of this rank.
        ranks: number of ranks of this host, which share the host's memory.
        unties: the head is a weight of its own, though the model ties it to the embedding.
    """
    section = rollout.vllm
    assert section is not None
    options = {
        "model": model,
        "served-model-name": MODEL_NAME,
        "uds": socket,
        "dtype": str(dtype).removeprefix("torch."),
        "max-num-seqs": rollout.max_decode_rows or REQUESTS_PER_SERVER,
        "max-model-len": "auto",
        "generation-config": "vllm",  # no defaults of sampling from the model
        "logprobs-mode": "processed_logprobs",
    }
    if unties:
        options["hf-overrides"] = '{"tie_word_embeddings": false}'
    on_gpu = device.type == "cuda"
    if rollout.kv_cache_gib is not None:
        options["kv-cache-memory-bytes"] = int(rollout.kv_cache_gib * 2**30)
    elif on_gpu:
        free, total = torch.cuda.mem_get_info(device)
        options["gpu-memory-utilization"] = f"{_GPU_SHARE * free / total:.3f}"
    else:
        half = psutil.virtual_memory().available / 2 / ranks
        options["kv-cache-memory-bytes"] = int(min(half, _CPU_CACHE_GIB * 2**30))
    flags = ["disable-uvicorn-access-log"]
    flags += ["enable-sleep-mode"] * (on_gpu and not rollout.max_lag)
    flags += ["enforce-eager"] * (not rollout.cuda_graphs)
    words = [f"--{name}={value}" for name, value in options.items()] + [f"--{flag}" for flag in flags]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *words, *section.arguments]


def server_environment(environment: Mapping[str, str], device: torch.device) -> dict[str, str]:
    """Return the environment of a server, given that of this process; a user's values of vLLM's variables are kept."""
    # vLLM's sleep mode has refused expandable segments
    given = without_own_settings(environment)
    kept = {name: value for name, value in given.items() if not _NOT_PASSED.fullmatch(name)}
    settings = {"VLLM_NO_USAGE_STATS": "1"}
    if device.type == "cuda":
        visible = [part for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        index = device.index or 0
        kept["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
    else:
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return settings | kept | {"VLLM_SERVER_DEV_MODE": "1"}


def require_interpreter(python: str) -> None:
    """Raise UserError unless there is such a program."""
    require(
        shutil.which(python) is not None,
        f"rollout.vllm.python must be the interpreter of an environment with vLLM, got {python}, which cannot be run: "
        "give its path",
    )


class ServerProcess:
    """A server as a child of this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it.

        Args:
            command: words of the command.
            environment: its environment variables.
            log: file that its output is appended to.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # a list of arguments  # nosec B603 B607
                ["sh", "-c", _UNTIL_THIS_PROCESS_ENDS % _STOP_SECONDS, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    def wait_ready(self, server: VLLMServer) -> None:
        """Wait until a server answers.

        Args:
            server: address of this process.

        Raises:
            UserError: when the process ends, or takes too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(ServerLost):
                server.call("GET", "/health", seconds=_ANSWER_SECONDS)
                server.introduce()
                return
            time.sleep(_POLL_SECONDS)
        self.stop()
        raise UserError(
            f"vLLM must start with rollout.vllm.python, it did not ({self.last_error()}): read {self._log}, and change "
            "rollout.vllm.python or rollout.vllm.arguments"
        )

    def last_error(self) -> str:
        """Return the last error in the log that is not only the consequence of another."""
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, self._log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        told = [line for line in lines if " WARNING " not in line and " INFO " not in line]
        errors = [match[0] for line in told if (match := _ERROR.search(line))]
        causes = [error for error in errors if not any(word in error for word in _CONSEQUENCES)]
        status = self._process.poll()
        return shortened((causes or errors or [f"exit status {status}"])[-1], 200)

    def stop(self) -> None:
        """End the process and those that it has started; a second call does nothing."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
