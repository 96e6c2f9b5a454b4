"""Generation by vLLM servers: each request is an HTTP request for one completion, with token ids in both directions.

Requests go to the server that has the fewest, up to a limit for each. A server that stops answering is lost: its
requests are sent again, with the same seeds, to the others; without others the owner of the servers is asked for a new
one. Completions arrive whole, so none is continued from a lost server. An open batch that pauses makes its servers
return what they have sampled, and continues from there with the weights that they have then.

vLLM reports one log-prob per token. Under `processed_logprobs` it is that of the distribution at the temperature, which
is what training computes if nothing is truncated or penalised. Seeds give vLLM's own random numbers: samples are
reproducible on the same server, and differ from those of the other backends.

The client, httpx2, is imported only where there is a server.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from hybrid_rlhf.generation.batching.continuous import BatchLoad
from hybrid_rlhf.generation.batching.images import PromptImages
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
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
_INTERRUPT_SECONDS = 2.0
"""Longest time in which paused servers return the completions that they have begun; later ones have arrived after."""
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
    setting: str = "rollout.vllm"
    """The setting that names it, for messages."""

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
            ServerLost, UserError: as in `call`, and UserError without a model in the answer.
        """
        answer = self.call("GET", "/v1/models")
        try:
            card = answer["data"][0]
            self.model = card["id"]
        except (TypeError, LookupError):
            raise UserError(
                f"{self.shown} must be a vLLM server, its /v1/models has no model ({shortened(str(answer), 300)}): "
                f"check {self.setting}"
            ) from None
        self.max_positions = card.get("max_model_len")

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens of a prompt but the first; otherwise as `likely_tokens`."""
        return [likely[token] for token, likely in zip(tokens[1:], self.likely_tokens(tokens, 0), strict=True)]

    def likely_tokens(self, tokens: Sequence[int], top: int) -> list[dict[int, float]]:
        """Return for all tokens of a prompt but the first the log-probs at temperature 1 of the token and of the `top`
        most likely ones in its place.

        Raises:
            ServerLost, UserError: as in `call`, and UserError without log-probs in the answer.
        """
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top,
        }
        choice = self.call("POST", "/v1/completions", json=body)["choices"][0]
        logprobs = choice.get("prompt_logprobs")
        if logprobs is None:
            raise UserError(f"{self.setting} must be servers with prompt_logprobs, {self.shown} has none: use vLLM")
        return [{int(token): float(of["logprob"]) for token, of in likely.items()} for likely in logprobs[1:]]

    def content(self, response: httpx2.Response, path: str) -> Any:
        """Return the JSON of an answer; None if it is empty.

        Raises:
            ServerLost: for a failure of the server.
            UserError: for a refused request.
        """
        status = response.status_code
        if status == HTTPStatus.OK:
            with contextlib.suppress(ValueError):  # the page of another kind of server
                return response.json() if response.content else None
        text = shortened(response.text, 300)
        if status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS:
            raise ServerLost(f"HTTP {status}: {text}")
        if status == HTTPStatus.BAD_REQUEST:
            raise UserError(
                f"{self.shown} must accept what {path} is asked, it answered HTTP 400 ({text}): change its settings"
            )
        raise UserError(
            f"{self.shown} must have vLLM's route {path}, it answered HTTP {status} ({text}): start vLLM with "
            f"VLLM_SERVER_DEV_MODE=1, and check {self.setting}"
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
        self.records_routes = self.reads_images = False
        self.banned_ids: Sequence[int] = ()
        self.continues = True
        self.kv_cache_bytes = 0  # the cache is the servers'
        self.load = BatchLoad()
        """Number of requests at servers in `run_open`."""
        self._max_positions = max_positions

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model and every server has positions for; none: no limit."""
        limits = [self._max_positions, *(server.max_positions for server in self.live)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def live(self) -> list[VLLMServer]:
        """Servers that are not lost."""
        return [server for server in self.servers if server.lost is None]

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
        with _Session(self, takes_parts=True) as session:
            while not arrivals.closed:
                interrupts = arrivals.choose(wait=not running) and bool(running)
                if interrupts:
                    self._require_weights()
                    session.interrupt()
                    while (finished := session.next(0.0)) is not None:
                        yield from self._taken(finished, running, session)
                for request in arrivals.take(wait=not running):
                    running.add(request)
                    session.submit(request)
                if interrupts and not arrivals.closed:
                    session.go_on()
                for request in arrivals.take_cancelled():
                    running.discard(request)
                    session.cancel(request)
                self.load = BatchLoad(rows=len(running))
                if running and (finished := session.next(_OPEN_POLL_SECONDS)) is not None:
                    yield from self._taken(finished, running, session)
        self.load = BatchLoad()

    def _taken(self, finished: _Finished, running: set[Request], session: _Session) -> Iterator[NewTokens]:
        """Append the tokens of a request, which is sent again if it was interrupted."""
        request, choice = finished
        if request not in running:
            return
        yield from _appended(request, choice)
        if not request.ended:
            session.submit(request)
        else:
            running.discard(request)

    def renew(self, *, recompute: bool) -> None:
        """Do nothing: servers compute the keys and values of what continues again."""

    def prompt_logprobs(
        self, tokens: Sequence[int], adapter: int = 0, top: int = 0, images: PromptImages | None = None
    ) -> PromptLogprobs:
        """Return the log-probs of a prompt, without other tokens. There are no adapters and images."""
        server = (self.live or self.servers)[0]
        return PromptLogprobs(server.prompt_logprobs(tokens), [])

    def reset(self) -> None:
        """Clear the load after an exception in `run_open`."""
        self.load = BatchLoad()

    def close(self) -> None:
        """Do nothing: the servers belong to the owner of the backend."""

    def _require_weights(self) -> None:
        """Raise UserError if a server has other weights than at the start: it was restarted, or updated by another
        run."""
        for server in self.live:
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


_Finished = tuple[Request, dict[str, Any]]
"""A request with the tokens of a server, which end it unless it was interrupted."""


class _Session:
    """Requests at servers, sent by an event loop in a thread."""

    def __init__(self, backend: VLLMBackend, *, takes_parts: bool = False) -> None:
        """Take the servers; `takes_parts`: requests may return unfinished, and are submitted again."""
        self._backend = backend
        self._takes_parts = takes_parts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-requests", daemon=True)
        self._finished: queue.SimpleQueue[tuple[Request, dict[str, Any] | Exception]] = queue.SimpleQueue()
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self._clients: dict[VLLMServer, httpx2.AsyncClient] = {}
        self._posts: dict[VLLMServer, set[asyncio.Future[Any]]] = {server: set() for server in backend.servers}
        self._in_flight = Counter[VLLMServer]()
        self._sent = set[Request]()
        """Requests that are at servers."""
        self._changed = asyncio.Condition()
        self._losses = Counter[VLLMServer]()
        self._failure: UserError | None = None
        """Reason why no server can be had."""
        self._is_interrupted = False

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

    def interrupt(self) -> None:
        """Make the servers return what they have sampled, and send nothing until `go_on`."""
        asyncio.run_coroutine_threadsafe(self._interrupt(), self._loop).result()

    def go_on(self) -> None:
        """Let the servers sample again."""
        asyncio.run_coroutine_threadsafe(self._go_on(), self._loop).result()

    def next(self, seconds: float) -> _Finished | None:
        """Return a request and its completion; None if none arrives in time.

        Raises:
            Exception: the error of a request.
        """
        try:
            request, result = self._finished.get(block=seconds > 0, timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(result, Exception):
            raise result
        return request, result

    # -- in the thread of the event loop

    def _begin(self) -> None:
        self._watch = self._loop.create_task(self._watch_servers())

    async def _end(self) -> None:
        if self._is_interrupted:
            await self._tell_all("/resume")
        tasks = [self._watch, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    async def _interrupt(self) -> None:
        async with self._changed:  # no server is being started
            self._is_interrupted = True
        await self._tell_all("/pause", mode="abort")
        posts = [post for posts in self._posts.values() for post in posts]
        if posts:
            await asyncio.wait(posts, timeout=_INTERRUPT_SECONDS)
        for post in posts:
            post.cancel()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._sent)

    async def _go_on(self) -> None:
        await self._tell_all("/resume")
        async with self._changed:
            self._is_interrupted = False
            self._changed.notify_all()

    async def _tell_all(self, path: str, **params: str) -> None:
        """Call a route of all servers."""
        import httpx2

        async def tell(server: VLLMServer) -> None:
            try:
                server.content(await self._client(server).post(path, params=params, timeout=_CALL_SECONDS), path)
            except (ServerLost, httpx2.TransportError) as error:
                self._lose(server, _reason(error))

        await asyncio.gather(*map(tell, self._backend.live))

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
            self._sent.add(request)
            try:
                return await self._choice(server, request)
            except ServerLost as error:
                if self._is_interrupted:
                    return _NOTHING
                failures[server] += 1
                is_lost = failures[server] >= _TRIES or not await self._is_healthy(server)
                if is_lost and server.lost is None and losses == self._losses[server]:  # not another in its place
                    self._lose(server, str(error))
            finally:
                async with self._changed:
                    self._sent.discard(request)
                    self._in_flight[server] -= 1
                    self._changed.notify_all()

    async def _take_server(self) -> VLLMServer:
        """Return the server with the fewest requests, when one may take another."""
        backend = self._backend
        async with self._changed:
            while True:
                if self._is_interrupted:
                    await self._changed.wait()
                    continue
                live = backend.live
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
            ServerLost: when it does not answer, or aborts the request before it has begun.
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
        whole = ("stop", "length", "abort") if self._takes_parts else ("stop", "length")
        if choice["finish_reason"] not in whole or not tokens:
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
            for server in self._backend.live:
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
    begun = len(request.token_ids)
    return {
        "model": model,
        "prompt": request.all_token_ids,
        "max_tokens": len(request.uniforms) - begun,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": max(0, params.min_new_tokens - begun),
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted(request.stop),
        "ignore_eos": True,  # the stop tokens are ours
        "seed": int(request.uniforms[begun] * 2**53),  # differs for each sample of a prompt
        "logprobs": 0,
        "return_token_ids": True,  # no password  # nosec B105
    }


_NOTHING: dict[str, Any] = {"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "abort"}
"""What an interrupted request has that no server has begun."""


def _appended(request: Request, choice: dict[str, Any]) -> Iterator[NewTokens]:
    """Append the tokens of a completion to its request, one in a step."""
    is_whole = choice["finish_reason"] != "abort"
    left = len(choice["token_ids"])
    for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
        left -= 1
        request.append(token, logprob, logprob)
        # the server's context is shorter, or it found a stop string
        if is_whole and not left and not request.ended:
            request.finish_reason = choice["finish_reason"]
        yield [(request, token)]
        if request.ended:
            return
