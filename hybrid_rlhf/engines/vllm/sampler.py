"""The actor's sampler by vLLM: weight sync, its check, and the engine that samples.

A sync writes the actor's weights, adapters merged, as a Hugging Face folder: in shared memory by default, or in a
folder that the servers of other hosts see too. Then each server pauses, loads the folder (`reload_weights`), drops its
prefix cache, is given the number of updates as the label of its weights, and resumes. The folder always has the current
weights, so a server that has to be started again needs nothing else.

After each sync the servers report the log-probs of a few fixed tokens, which are compared with those of the training
forward. vLLM has no hidden states to compare, so that the message cannot name a layer.

Each rank of the actor samples its share of the prompts: with `rollout.vllm.python` at its own server, with
`rollout.vllm.urls` at all servers, whose weights rank 0 updates. On a GPU, a rank's own server sleeps while the actor
trains, unless it samples meanwhile (`rollout.max_lag`). It then has no weights, and loads the folder when it wakes.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.credentials import expanded_key
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.engines.role_model import Actor
from hybrid_rlhf.engines.sampling_engine import groups_of
from hybrid_rlhf.engines.vllm.process import (
    ServerProcess,
    private_folder,
    require_interpreter,
    server_command,
    server_environment,
)
from hybrid_rlhf.engines.weight_check import TrainingProbe, logprob_limit
from hybrid_rlhf.functional.logprobs import agreement
from hybrid_rlhf.generation.architecture.hugging_face import trained_positions
from hybrid_rlhf.generation.backends.vllm import REQUESTS_PER_SERVER, ServerLost, VLLMBackend, VLLMServer
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine, default_stop_token_ids
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.pretrained.loading import DTYPES, position_limit
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.urls import expanded_url, shown_url
from hybrid_rlhf.runtime.world import shared_user_errors

_SHARED_MEMORY = Path("/dev/shm")  # files of the library's own, in a private folder  # nosec B108
_RESTARTS = 3
"""Number of times that a rank starts its server again in one rollout."""


class VLLMSampler:
    """A SamplingEngine on the actor's ranks, whose completions come from vLLM."""

    def __init__(
        self,
        actor: Actor,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rollout: RolloutConfig,
        logs: Path,
        max_logprob_diff: float | None = None,
    ) -> None:
        """Find the servers; the first sync starts or loads them. Every rank of the actor makes this call.

        Args:
            actor: engine of the actor, which does not sample itself.
            tokenizer: written beside the weights.
            rollout: settings of sampling, with the section vllm.
            logs: folder of the logs of servers that ranks start.
            max_logprob_diff: faults.max_logprob_diff of the config.

        Raises:
            UserError: on every rank, when there is no such interpreter, a variable of an address is not set, or the
                ranks share no folder.
        """
        section = rollout.vllm
        assert section is not None
        self._actor = actor
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._section = section
        world = actor.world
        self.world = world
        self.device = world.device
        """Device of this rank."""
        self.generation_world = actor.generation_world
        self.groups = groups_of(world, self.generation_world)
        """Number of groups that sample, one for each rank, and the index of this rank's."""
        self.work = DecodeWork()
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        training = next(actor.lm.parameters()).dtype
        self._dtype = DTYPES.get(rollout.dtype, training)
        self.max_logprob_diff = logprob_limit(max_logprob_diff, training, self._dtype)
        self._exact = {training, self._dtype} == {torch.float32}
        self._limit = max_logprob_diff
        self._tied: dict[str, str] = dict(getattr(actor.lm, "all_tied_weights_keys", {}))
        """Weights that are not written otherwise, with the names of those that they equal."""
        self._version = -1
        """Version of the weights of the last sync; -1 forces the next."""
        self._expected: Tensor | None = None
        """Log-probs of the probe's tokens under the training forward at the last sync."""
        self._log = logs / f"vllm-rank-{world.rank}.log"
        self._process: ServerProcess | None = None
        self._restarts_left = _RESTARTS
        self.samples_while_training = rollout.max_lag > 0
        self._sleeps = section.python is not None and self.device.type == "cuda" and not self.samples_while_training
        with shared_user_errors(world):
            self._servers = self._servers_by_url() if section.python is None else [self._own_server(section.python)]
            parent = self._weights_parent()
        folder = None
        if world.is_main:
            folder = private_folder(parent)
            if section.folder is not None:
                folder.chmod(0o755)  # servers may run as another user
        shared = world.broadcast_object(folder)
        assert shared is not None
        self._folder = shared
        """Folder of the weights, the same on every rank."""
        config = actor.lm.config.get_text_config()
        self._backend = VLLMBackend(
            self._servers,
            vocab_size=config.vocab_size,
            revive=self._revive,
            max_positions=position_limit(actor.lm),
            trained_positions=trained_positions(config),
            requests_per_server=rollout.max_decode_rows or REQUESTS_PER_SERVER,
        )

    @property
    def weight_version(self) -> int:
        """Number of optimizer updates of the actor's weights."""
        return self._actor.weight_version

    @contextlib.contextmanager
    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Iterator[GenerationEngine]:
        """Return a context in which the current weights generate. Every rank of the actor must enter.

        Raises:
            UserError: on every rank, when servers do not start, answer or load the weights, or their log-probs differ
                from those of the training forward.
        """
        self._sync()
        generation = GenerationEngine(
            self._backend,
            stop_token_ids=default_stop_token_ids(self._actor.lm) if stop_token_ids is None else stop_token_ids,
            tokenizer=tokenizer,
            weight_version=self.weight_version,
            keeps_backend=True,
        )
        try:
            yield generation
        finally:
            self.work = generation.work
            generation.close()
            start = time.perf_counter()
            self._call_own("/sleep", level=2)  # level 1 would copy weights to the host, which the folder has
            self.weight_sync_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[None]:
        """Context in which the actor temporarily has other weights under the same version; they are synced on use."""
        self._version = -1
        try:
            yield
        finally:
            self._version = -1

    def close(self) -> None:
        """End the server of this rank."""
        if self._process is not None:
            self._process.stop()

    # -- servers

    def _own_server(self, python: str) -> VLLMServer:
        require_interpreter(python)
        socket = private_folder() / "vllm.sock"
        return VLLMServer("http://vllm", f"of rank {self.world.rank}", socket=socket)

    def _servers_by_url(self) -> list[VLLMServer]:
        key = expanded_key(self._section.api_key, key="rollout.vllm.api_key")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return [
            VLLMServer(expanded_url(url, key="rollout.vllm.urls"), shown_url(url), headers=headers)
            for url in self._section.urls
        ]

    def _weights_parent(self) -> str:
        """Return the folder in which the main rank makes that of the weights."""
        parent = self._section.folder
        if parent is None:
            require(
                not self.world.has_several_hosts or bool(self._section.urls),
                "ranks of several hosts need a folder that all of them see, got no rollout.vllm.folder: give one on a "
                "shared file system",
            )
            parent = str(_SHARED_MEMORY) if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
        if not os.access(parent, os.W_OK):
            raise UserError(f"rollout.vllm.folder must be a folder to write to, {parent} is none: give another")
        needed, free = 2 * self._weight_bytes() / 2**30, shutil.disk_usage(parent).free / 2**30
        require(
            needed <= free or not self.world.is_main,
            f"rollout.vllm.folder must have room for the weights twice, as a sync writes them beside those before, "
            f"{needed:.1f} GiB, {parent} has {free:.1f} GiB left: give a folder with more, or enlarge it (docker run "
            "--shm-size)",
        )
        return parent

    def _weight_bytes(self) -> int:
        """Bytes of the files of the weights."""
        shapes = self._actor.facts.weights
        written = [*shapes, *(source for source in self._tied.values() if source in shapes)]
        return next(self._actor.lm.parameters()).itemsize * sum(math.prod(shapes[name]) for name in written)

    def _start(self) -> None:
        """Start this rank's server with the weights of the folder, in place of the one that there is.

        Raises:
            UserError: when it does not start.
        """
        (server,) = self._servers
        assert server.socket is not None and self._section.python is not None
        if self._process is not None:
            self._process.stop()
        server.socket.unlink(missing_ok=True)
        command = server_command(
            self._section.python,
            self._rollout,
            model=self._folder,
            socket=server.socket,
            dtype=self._dtype,
            device=self.device,
            ranks=self.world.local_size,
            unties=bool(self._tied) and self.device.type == "cpu",
        )
        start = time.perf_counter()
        logger.info("vLLM starts on rank %d, its log is %s", self.world.rank, self._log)
        self._process = ServerProcess(command, server_environment(os.environ, self.device), self._log)
        self._process.wait_ready(server)
        try:
            self._label(server)
        except ServerLost as error:
            raise UserError(f"vLLM must run on, it ended after its start ({error}): read {self._log}") from error
        server.lost = None
        logger.info("vLLM has started on rank %d in %.0f s", self.world.rank, time.perf_counter() - start)

    def _revive(self) -> None:
        """Make a server available when all are lost; called in a thread."""
        if self._section.urls:
            reasons = "; ".join(f"{server.shown}: {server.lost}" for server in self._servers)
            raise UserError(
                f"a vLLM server of rollout.vllm.urls must answer, all are lost ({reasons}): start one, and resume the "
                "run"
            )
        (server,) = self._servers
        process = self._process
        assert process is not None
        if self._restarts_left == 0:
            raise UserError(
                f"vLLM must complete a rollout, it failed {_RESTARTS + 1} times ({server.lost}; "
                f"{process.last_error()}): read {self._log}, and change rollout.vllm.arguments"
            )
        self._restarts_left -= 1
        logger.warning("vLLM on rank %d has failed (%s), and is started again", self.world.rank, process.last_error())
        self._start()
        self._verify(server)

    # -- weights

    def _sync(self) -> None:
        """Load the current weights into the servers, if they have changed or a server is lost, and check them."""
        world = self.world
        self.weight_sync_seconds = self.weight_check_seconds = 0.0
        self._restarts_left = _RESTARTS
        start = time.perf_counter()
        with shared_user_errors(world):
            self._call_own("/wake_up")
        is_current = self._version == self.weight_version and all(server.lost is None for server in self._servers)
        if not all(world.all_gather_objects(is_current)):
            self._version = -1  # the servers' weights are mixed until all are loaded
            self._backend.weight_label = f"{self._folder.name}-{self.weight_version}"  # of this run
            save_model(self._folder, self._weights(), lm=self._actor.lm, tokenizer=self._tokenizer, world=world)
            with shared_user_errors(world):
                self._load()
            self._share_servers()
            self._check_servers()
            self._version = self.weight_version
        elif self._sleeps:
            with shared_user_errors(world):
                self._load()
        self.weight_sync_seconds = time.perf_counter() - start - self.weight_check_seconds

    def _weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the actor's weights as `full_tensors`, and heads that are tied to another weight as weights of their
        own. On a CPU, vLLM 0.32 packs a tied head once and does not load it again; tied ones elsewhere ignore it."""
        for name, tensor in full_tensors(self._actor.lm, self.world):
            yield name, tensor
            for tied in (tied for tied, source in self._tied.items() if source == name):
                yield tied, None if tensor is None else tensor.clone()

    def _call_own(self, path: str, **params: int) -> None:
        """Call a route of sleep at the server of this rank, if it sleeps between rollouts."""
        (first, *_) = self._servers
        if self._sleeps and self._process is not None and first.lost is None:
            try:
                first.call("POST", path, params=params)
            except ServerLost as error:
                first.lost = str(error)  # the next sync starts another

    def _load(self) -> None:
        """Load the folder into the servers that this rank updates.

        Raises:
            UserError: when none loads it.
        """
        if self._section.python is not None:
            if self._process is None or not self._reload(self._servers[0]):
                self._start()
        elif self.world.is_main:
            with ThreadPoolExecutor(len(self._servers)) as pool:
                loaded = list(pool.map(self._reload, self._servers))
            if not any(loaded):
                self._revive()

    def _reload(self, server: VLLMServer) -> bool:
        """Load the folder into a running server; returns False if it is lost."""
        was_lost = server.lost is not None
        try:
            server.introduce()
            server.call("POST", "/pause", params={"mode": "wait"})
            arguments = {"weights_path": str(self._folder)}
            server.call("POST", "/collective_rpc", json={"method": "reload_weights", "kwargs": arguments})
            server.call("POST", "/reset_prefix_cache")
            self._label(server)
            server.call("POST", "/resume")
        except ServerLost as error:
            server.lost = str(error)
            if not was_lost:
                logger.warning("the vLLM server %s is lost in the weight sync: %s", server.shown, error)
            return False
        server.lost = None
        return True

    def _label(self, server: VLLMServer) -> None:
        server.call("POST", "/update_weight_version", json={"new_version": self._backend.weight_label})

    def _share_servers(self) -> None:
        """Tell all ranks which servers of the URLs are lost, and what those told that are not."""
        if self._section.urls:
            told = self.world.broadcast_object([(s.lost, s.model, s.max_positions) for s in self._servers])
            for server, (lost, model, max_positions) in zip(self._servers, told, strict=True):
                server.lost = lost
                server.model = model
                server.max_positions = max_positions

    # -- check

    def _check_servers(self) -> None:
        """Compare all servers with the training forward.

        Raises:
            UserError: on every rank, when one differs.
        """
        start = time.perf_counter()
        self._expected = TrainingProbe(self._actor, self._backend.vocab_size).logprobs().cpu()
        with shared_user_errors(self.world):
            if self._section.python is not None or self.world.is_main:
                for server in self._servers:
                    if server.lost is None:
                        self._verify(server)
        self.weight_check_seconds = time.perf_counter() - start

    def _verify(self, server: VLLMServer) -> None:
        """Raise UserError if a server's log-probs of the probe's tokens differ from those of the training forward."""
        expected = self._expected
        if expected is None or not bool(expected.isfinite().all()):
            return  # not checked yet, or the training weights are not finite, which the loop reports
        try:
            logprobs = server.prompt_logprobs(probe_tokens(self._backend.vocab_size))
        except ServerLost as error:
            log = "its log" if self._section.python is None else self._log
            raise UserError(
                f"vLLM must report the log-probs of {len(expected) + 1} tokens, the server {server.shown} does not "
                f"({error}): read {log}"
            ) from error
        dtype = torch.float32 if self._exact else torch.bfloat16
        result = agreement(
            torch.tensor(logprobs), expected=expected, dtype=dtype, low_precision=LOW_PRECISION_TOLERANCE
        )
        tolerance = result.tolerance if self._limit is None else self._limit
        require(
            result.measured <= tolerance,
            f"vLLM must agree with the training forward to {tolerance:.3g} nats, the server {server.shown} differs by "
            f"{result.measured:.3g} after the weight sync of update {self.weight_version}: leave rollout.vllm out, or "
            "raise faults.max_logprob_diff",
        )
