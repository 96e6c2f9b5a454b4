"""Generation by vLLM servers: each request is an HTTP request for one completion, with token ids in both directions.

Requests go to the server that has the fewest, up to a limit for each. A server that stops answering is lost: its
requests are sent again, with the same seeds, to the others; without others the owner of the servers is asked for a new
one. Completions arrive whole, so none is continued from a lost server.

vLLM reports one log-prob per token. Under `processed_logprobs` it is that of the distribution at the temperature, which
is what training computes if nothing is truncated or penalised. Seeds give vLLM's own random numbers: samples are
reproducible on the same server, and differ from those of the other backends.

The client, httpx2, is imported only where there is a server.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.batching.arrivals import Arrivals
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
from hybrid_rlhf.generation.batching.rows import BatchLoad
from hybrid_rlhf.generation.sampling import PromptLogprobs
from hybrid_rlhf.runtime.observability.logs import logger, shortened

if TYPE_CHECKING:
    import httpx2  # imported at run time only where there is a server

logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs every request
REQUESTS_PER_SERVER = 256
"""Default limit of requests that a rank has at a server at a time: vLLM's default of `--max-num-seqs`."""
_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 1800.0
"""Time limit of a call other than a completion; large weights are loaded in minutes."""
_HEALTH_SECONDS = 30.0
"""Time limit of a server's answer that it is alive, and the time between two such questions."""
_POLL_SECONDS = 0.5
"""Longest time without a step, so that a closed engine stops."""
_OPEN_POLL_SECONDS = 0.02
"""Longest time until requests that arrive in an open batch are sent, while others run."""
_TRIES = 3
"""Number of failures of a request at a server that calls itself healthy, after which the server is lost."""


class ServerLost(Exception):
    """A server does not answer, or has failed; its requests may succeed elsewhere."""


@dataclass(eq=False)
class VLLMServer:
    """Address of a server, and what it has told of itself."""

    url: str
    shown: str
    """The address in messages, without secrets."""
    socket: Path | None = None
    """Unix socket of a server on this host; none: TCP."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    model: str = ""
    """Name of its model."""
    max_positions: int | None = None
    lost: str | None = None
    """Reason why it is not used; none: it is."""

    def call(self, method: str, path: str, *, seconds: float = _CALL_SECONDS, **arguments: Any) -> Any:
        """Return the JSON of a route.

        Args:
            method: GET or POST.
            path: path of the route.
            seconds: time limit.
            arguments: arguments of httpx2, such as json and params.

        Raises:
            ServerLost: when it does not answer, or fails.
            UserError: when it refuses the request.
        """
        import httpx2

        transport = httpx2.HTTPTransport(uds=None if self.socket is None else str(self.socket))
        timeout = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS)
        with httpx2.Client(transport=transport, base_url=self.url, headers=self.headers, timeout=timeout) as client:
            try:
                return self.content(client.request(method, path, **arguments), path)
            except httpx2.TransportError as error:
                raise ServerLost(_reason(error)) from error

    def introduce(self) -> None:
        """Ask for the name and the context length of the model.

        Raises:
            ServerLost, UserError: as in `call`.
        """
        (card, *_) = self.call("GET", "/v1/models")["data"]
        self.model = card["id"]
        self.max_positions = card.get("max_model_len")

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens of a prompt but the first, at temperature 1.

        Raises:
            ServerLost, UserError: as in `call`, and UserError without log-probs in the answer.
        """
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choice = self.call("POST", "/v1/completions", json=body)["choices"][0]
        logprobs = choice.get("prompt_logprobs")
        if logprobs is None:
            raise UserError(f"a server of rollouts must return prompt_logprobs, {self.shown} does not: use vLLM")
        pairs = zip(tokens[1:], logprobs[1:], strict=True)
        return [float(of_token[str(token)]["logprob"]) for token, of_token in pairs]

    def content(self, response: httpx2.Response, path: str) -> Any:
        """Return the JSON of an answer; None if it is empty.

        Raises:
            ServerLost: for a failure of the server.
            UserError: for a refused request.
        """
        status = response.status_code
        if status == HTTPStatus.OK:
            return response.json() if response.content else None
        text = shortened(response.text, 300)
        if status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS:
            raise ServerLost(f"HTTP {status}: {text}")
        raise UserError(
            f"{self.shown} must have vLLM's route {path}, it answered HTTP {status} ({text}): start vLLM with "
            "VLLM_SERVER_DEV_MODE=1, and check rollout.vllm"
        )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class VLLMBackend:
    """Completes requests at servers."""

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        *,
        vocab_size: int,
        revive: Callable[[], None],
        max_positions: int | None = None,
        trained_positions: int | None = None,
        requests_per_server: int = REQUESTS_PER_SERVER,
    ) -> None:
        """Take servers that have introduced themselves.

        Args:
            servers: servers with the same weights.
            vocab_size: size of the model's vocabulary.
            revive: called in a thread when all servers are lost; makes one available, or raises UserError.
            max_positions: longest sequence that the model has positions for; none: no limit.
            trained_positions: longest sequence that the model was trained for; none: unknown.
            requests_per_server: maximum number of requests at a server at a time.
        """
        self.servers = servers
        self.vocab_size = vocab_size
        self.revive = revive
        self.trained_positions = trained_positions
        self.requests_per_server = requests_per_server
        self.weight_label = ""
        """Label of the weights that every server must have at the end of a run of requests."""
        self.work = DecodeWork()
        self.records_routes = self.continues = False
        self._max_positions = max_positions
        self._load = BatchLoad()

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model and every server has positions for; none: no limit."""
        limits = [self._max_positions, *(server.max_positions for server in self.servers if server.lost is None)]
        return min((limit for limit in limits if limit is not None), default=None)

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """Complete all requests; yields the tokens of each completion when it arrives.

        Raises:
            UserError: when no server is left, one refuses a request or returns no token ids, or has other weights at
                the end.
        """
        with _Session(self) as session:
            for request in requests:
                session.submit(request)
            for _ in requests:
                while (finished := session.next(_POLL_SECONDS)) is None:
                    yield []
                yield from _appended(*finished)
        self._require_weights()

    def run_open(self, arrivals: Arrivals) -> Iterator[NewTokens]:
        """Complete requests as they arrive, until the batch is closed."""
        running = set[Request]()
        with _Session(self) as session:
            while not arrivals.closed:
                for request in arrivals.take(wait=not running):
                    running.add(request)
                    session.submit(request)
                for request in arrivals.take_cancelled():
                    running.discard(request)
                    session.cancel(request)
                self._load = BatchLoad(rows=len(running))
                finished = session.next(_OPEN_POLL_SECONDS) if running else None
                if finished is not None and finished[0] in running:
                    running.discard(finished[0])
                    yield from _appended(*finished)
        self._load = BatchLoad()

    @property
    def load(self) -> BatchLoad:
        """Number of requests at servers in `run_open`."""
        return self._load

    @property
    def kv_cache_bytes(self) -> int:
        """0: the cache is the servers'."""
        return 0

    def prompt_logprobs(self, tokens: Sequence[int], adapter: int = 0, top: int = 0) -> PromptLogprobs:
        """Return the log-probs of a prompt, without other tokens. There are no adapters."""
        server = next(server for server in self.servers if server.lost is None)
        return PromptLogprobs(server.prompt_logprobs(tokens), [])

    def reset(self) -> None:
        """Clear the load after an exception in `run_open`."""
        self._load = BatchLoad()

    def close(self) -> None:
        """Do nothing: the servers belong to the owner of the backend."""

    def _require_weights(self) -> None:
        """Raise UserError if a server has other weights than at the start: it was restarted, or updated by another
        run."""
        for server in [server for server in self.servers if server.lost is None]:
            try:
                label = server.call("GET", "/weight_info")["weight_version"]
            except ServerLost as error:
                server.lost = str(error)  # after its last completion
                continue
            if label != self.weight_label:
                raise UserError(
                    f"servers must keep the weights of the run during a rollout, {server.shown} has weight_version "
                    f"{label} in place of {self.weight_label}: resume the run, and let no other run use the server"
                )


class _Session:
    """Requests at servers, sent by an event loop in a thread."""

    def __init__(self, backend: VLLMBackend) -> None:
        self._backend = backend
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-requests", daemon=True)
        self._finished: queue.SimpleQueue[tuple[Request, dict[str, Any] | Exception]] = queue.SimpleQueue()
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self._clients: dict[VLLMServer, httpx2.AsyncClient] = {}
        self._posts: dict[VLLMServer, set[asyncio.Future[Any]]] = {server: set() for server in backend.servers}
        self._in_flight = Counter[VLLMServer]()
        self._changed = asyncio.Condition()
        self._losses = Counter[VLLMServer]()
        self._failure: UserError | None = None
        """Reason why no server can be had."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop.call_soon_threadsafe(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, request: Request) -> None:
        """Send a request."""
        self._loop.call_soon_threadsafe(self._start, request)

    def cancel(self, request: Request) -> None:
        """Drop a request."""
        self._loop.call_soon_threadsafe(lambda: request in self._tasks and self._tasks[request].cancel())

    def next(self, seconds: float) -> tuple[Request, dict[str, Any]] | None:
        """Return a request and its completion; None if none arrives in time.

        Raises:
            Exception: the error of a request.
        """
        try:
            request, result = self._finished.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(result, Exception):
            raise result
        return request, result

    # -- in the thread of the event loop

    def _begin(self) -> None:
        self._watch = self._loop.create_task(self._watch_servers())

    async def _end(self) -> None:
        tasks = [self._watch, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    def _start(self, request: Request) -> None:
        self._tasks[request] = self._loop.create_task(self._complete(request))

    async def _complete(self, request: Request) -> None:
        """Put the completion of a request, or its error, into the queue."""
        try:
            self._finished.put((request, await self._completion(request)))
        except Exception as error:  # noqa: BLE001 - raised again by `next`
            self._finished.put((request, error))
        finally:
            del self._tasks[request]

    async def _completion(self, request: Request) -> dict[str, Any]:
        failures = Counter[VLLMServer]()
        while True:
            server = await self._take_server()
            losses = self._losses[server]
            try:
                return await self._choice(server, request)
            except ServerLost as error:
                failures[server] += 1
                is_lost = failures[server] >= _TRIES or not await self._is_healthy(server)
                if is_lost and server.lost is None and losses == self._losses[server]:  # not another in its place
                    self._lose(server, str(error))
            finally:
                async with self._changed:
                    self._in_flight[server] -= 1
                    self._changed.notify_all()

    async def _take_server(self) -> VLLMServer:
        """Return the server with the fewest requests, when one may take another."""
        backend = self._backend
        async with self._changed:
            while True:
                live = [server for server in backend.servers if server.lost is None]
                if not live:  # the other requests wait for the lock meanwhile
                    await self._revive()
                    continue
                server = min(live, key=lambda server: self._in_flight[server])
                if self._in_flight[server] < backend.requests_per_server:
                    self._in_flight[server] += 1
                    return server
                await self._changed.wait()

    async def _revive(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            await asyncio.to_thread(self._backend.revive)
        except UserError as error:
            self._failure = error
            raise

    async def _choice(self, server: VLLMServer, request: Request) -> dict[str, Any]:
        """Return the completion of a server.

        Raises:
            ServerLost: when it does not answer, or aborts the request.
            UserError: when it refuses the request, or returns no token ids or log-probs.
        """
        path = "/v1/completions"
        content = server.content(await self._post(server, path, _body(request, server.model)), path)
        choice: dict[str, Any] = content["choices"][0]
        tokens = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None or logprobs is None or len(tokens) != len(logprobs):
            raise UserError(
                f"a server of rollouts must return token_ids and logprobs of each token, {server.shown} does not: use "
                "vLLM"
            )
        if choice["finish_reason"] not in ("stop", "length") or not tokens:
            raise ServerLost(f"it ended a completion of {len(tokens)} tokens by {choice['finish_reason']}")
        return choice

    async def _post(self, server: VLLMServer, path: str, body: dict[str, Any]) -> httpx2.Response:
        import httpx2

        post = self._loop.create_task(self._client(server).post(path, json=body))
        self._posts[server].add(post)
        try:
            return await post
        except httpx2.TransportError as error:
            raise ServerLost(_reason(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ServerLost("it was lost") from None  # `_lose` cancels the posts alone
        finally:
            post.cancel()
            self._posts[server].discard(post)

    async def _is_healthy(self, server: VLLMServer) -> bool:
        import httpx2

        try:
            response = await self._client(server).get("/health", timeout=_HEALTH_SECONDS)
        except httpx2.TransportError:
            return False
        return response.status_code == HTTPStatus.OK

    def _lose(self, server: VLLMServer, reason: str) -> None:
        """Use a server no more, and send its requests elsewhere."""
        server.lost = reason
        self._losses[server] += 1
        logger.warning("the vLLM server %s is lost, its requests are repeated: %s", server.shown, reason)
        for post in self._posts[server]:
            post.cancel()

    async def _watch_servers(self) -> None:
        """Find servers that vanish without closing their connections."""
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            for server in [server for server in self._backend.servers if server.lost is None]:
                if not await self._is_healthy(server) and server.lost is None:
                    self._lose(server, f"no answer from /health in {_HEALTH_SECONDS:g} s")

    def _client(self, server: VLLMServer) -> httpx2.AsyncClient:
        import httpx2

        if server not in self._clients:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            socket = None if server.socket is None else str(server.socket)
            self._clients[server] = httpx2.AsyncClient(
                transport=httpx2.AsyncHTTPTransport(uds=socket, limits=limits),
                base_url=server.url,
                headers=server.headers,
                timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),  # a completion may wait for its turn for long
            )
        return self._clients[server]


def _body(request: Request, model: str) -> dict[str, Any]:
    """Return the body of a request for one completion. Every parameter is given, so that no default of the server
    applies."""
    params = request.params
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": len(request.uniforms),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": params.min_new_tokens,
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted(request.stop),
        "ignore_eos": True,  # the stop tokens are ours
        "seed": int(request.uniforms[0] * 2**53),  # differs for each sample of a prompt
        "logprobs": 0,
        "return_token_ids": True,  # no password  # nosec B105
    }


def _appended(request: Request, choice: dict[str, Any]) -> Iterator[NewTokens]:
    """Append the tokens of a completion to its request, one in a step."""
    left = len(choice["token_ids"])
    for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
        left -= 1
        request.append(token, logprob, logprob)
        if not left and request.finish_reason is None:  # the server's context is shorter, or it found a stop string
            request.finish_reason = choice["finish_reason"]
        yield [(request, token)]
        if request.finish_reason is not None:
            return
