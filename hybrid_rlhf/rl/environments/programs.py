"""Programs as environments: any program that speaks OpenAI's API and is given the address.

While a rollout is sampled, each rank that samples serves the actor at `rollout.endpoint`. A program runs once per
episode, with a separate address, whose requests are recorded (recording.py); it returns the episode's reward. All
sequences of an episode have that reward, at their last tokens. A program outside of the run takes an episode and
reports its reward over HTTP (serving/episodes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.credentials import expanded_key
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import EndpointConfig, RolloutConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.images.expansion import IMAGE_MARK
from hybrid_rlhf.generation.open_batch import RequestBatch
from hybrid_rlhf.loop.user_code import import_named
from hybrid_rlhf.rl.environments.calls import CallFailure
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner, Turns, environment_row, is_finite_number
from hybrid_rlhf.rl.environments.recording import EpisodeService
from hybrid_rlhf.rl.images import ImageCatalogue, data_uri, digests_of, with_parts
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.observability.logs import logger, shortened
from hybrid_rlhf.runtime.world import World, shared_user_errors
from hybrid_rlhf.serving.app import Access, build_app
from hybrid_rlhf.serving.episodes import EpisodeQueue
from hybrid_rlhf.serving.service import Service, UnknownEpisode
from hybrid_rlhf.serving.web import bound_socket, served_in_background, url_of

MODEL = "actor"
"""Name of the model in a program's requests."""
Program = Callable[..., Any]
"""Function with the parameters base_url, api_key, model, row and the options; returns a reward or None."""


class ProgramRunner(EpisodeRunner):
    """Runs programs against the actor."""

    in_lock_step = False

    def __init__(
        self,
        program: Program | None,
        config: EnvironmentConfig,
        *,
        rollout: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        samples: bool = True,
        images: ImageCatalogue,
    ) -> None:
        """Read the API key and reserve the address. Every rank calls.

        Args:
            program: the function to call for each episode; None if programs outside of the run take the episodes.
            config: limits of an episode.
            rollout: the address, sampling and memory.
            tokenizer: tokenizer of the actor.
            world: all ranks.
            samples: true if this rank samples, and therefore has an address.
            images: reads the images of requests.

        Raises:
            UserError: on every rank, when any rank has no port or cannot bind its address, the environment variable of
                the API key is not set, or programs show images that the actor does not read.
        """
        super().__init__(config, rollout, world.device)
        self.shows_images = config.shows_images
        if self.shows_images and images.rules.refusal:
            raise UserError(f"environment.shows_images: {images.rules.refusal}")
        self._images = images
        is_read = images.has_data or self.shows_images
        self._image_refusal = "" if is_read else "no images are read without environment.shows_images"
        self._program = program
        self._tokenizer = tokenizer
        endpoint = rollout.endpoint or EndpointConfig()
        with shared_user_errors(world):
            key = expanded_key(endpoint.api_key, key="rollout.endpoint.api_key")
            require(
                endpoint.port + world.local_size <= 65536,
                f"rollout.endpoint.port must leave a port up to 65535 to each rank of a host, got {endpoint.port} and "
                f"{world.local_size} ranks: choose a lower one",
            )
            self._host = endpoint.host
            self._port = endpoint.port and endpoint.port + world.local_rank
            if rollout.endpoint is not None and samples:
                with bound_socket(self._host, self._port) as free:  # a port that stays the same in all rollouts
                    self._port = free.getsockname()[1]
        self._services: dict[str, EpisodeService] = {}
        """Running episodes by name."""
        self._shared: Service | None = None
        self._queue: EpisodeQueue | None = None
        self._url: str | None = None
        """Address while it is served; None while no rollout is sampled."""
        self._api_key = secrets.token_urlsafe(24) if key is None and program is not None else key
        if rollout.endpoint is not None:
            urls = world.all_gather_objects(url_of(self._host, self._port) if samples else None)
            if world.is_main:
                shown = ", ".join(url for url in urls if url is not None)
                logger.info("rollout.endpoint: programs ask the actor at %s while a rollout is sampled", shown)

    @contextlib.contextmanager
    def serve(self, batch: RequestBatch) -> Iterator[None]:
        """Serve the actor at the address, unless that is served already."""
        if self._url is not None:
            yield
            return
        sampling = self._rollout.sampling
        self._shared = Service(batch, self._tokenizer, name=MODEL, sampling=sampling, max_queue=sys.maxsize)
        self._queue = EpisodeQueue() if self._program is None else None
        access = Access(self._host, self._api_key)
        app = build_app(self._shared, access, created=int(time.time()), episodes=self._find, queue=self._queue)
        with served_in_background(app, self._host, self._port) as self._url:
            try:
                yield
            finally:
                self._url = None

    def play(
        self, prompt: Mapping[str, Any], params: SamplingParams, sample: int, turns: Turns
    ) -> Future[list[Episode]]:
        """Start the program of an episode."""
        assert self._shared is not None, "`serve` comes first"
        service = EpisodeService(
            self._shared,
            turns,
            config=self._config,
            sampling=params,
            sample=sample,
            images=self._images,
            image_refusal=self._image_refusal,
        )
        return self._calls.run(self._play(service, prompt))

    async def _play(self, service: EpisodeService, prompt: Mapping[str, Any]) -> list[Episode]:
        name = secrets.token_hex(8)
        self._services[name] = service
        row = environment_row(prompt)
        if digests_of(prompt):
            row["prompt"] = await asyncio.to_thread(self._shown, prompt)
        result = await self._calls.result(self._call(name, service, row))
        self._end(name, service)
        return _sequences(service, result, prompt["input_ids"])

    def _shown(self, prompt: Mapping[str, Any]) -> list[Message]:
        """The conversation of a prompt, with its images as a request may send them."""
        uris = [data_uri(image) for image in self._images.of_prompt(prompt)]
        return with_parts(json.loads(prompt["prompt"]), uris, mark=IMAGE_MARK)

    def _end(self, name: str, service: EpisodeService) -> None:
        """Answer and record no more requests of an episode."""
        service.closed = True
        self._services.pop(name, None)

    def _find(self, name: str) -> Service:
        service = self._services.get(name)
        if service is None:
            raise UnknownEpisode(f"an episode must run to be asked, {name[:40]!r} does not: use its base_url")
        return service

    def _call(self, name: str, service: EpisodeService, row: dict[str, Any]) -> Callable[[], Any]:
        """The call that plays an episode and returns its reward."""
        if self._queue is not None:
            told = {"model": MODEL, "row": row, "options": self._config.options}
            return partial(self._queue.play, name, told, partial(self._end, name, service))
        assert self._program is not None
        address = {"base_url": f"{self._url}/episodes/{name}/v1", "api_key": self._api_key}
        return partial(self._program, **address, model=MODEL, row=row, **self._config.options)


def read_program(config: EnvironmentConfig) -> Program:
    """Import the configured function.

    Raises:
        UserError: when it cannot be imported, or does not take the arguments.
    """
    program = import_named(config.program or "", what="environment.program:")
    if not callable(program):
        raise UserError(
            f"environment.program names a function, {config.program} is a {type(program).__name__}: check the name"
        )
    try:
        inspect.signature(program).bind(base_url="", api_key="", model="", row={}, **config.options)
    except TypeError as error:
        raise UserError(
            "environment.program takes base_url, api_key, model, row and environment.options, "
            f"{config.program} does not ({error}): change its arguments"
        ) from error
    return program  # type: ignore[no-any-return]


def _sequences(service: EpisodeService, result: object, prompt: Sequence[int]) -> list[Episode]:
    """The sequences of an episode with its reward; one without tokens if no request was answered."""
    reward = _read_reward(result)
    sequences = service.sequences or [Episode(list(prompt))]
    failure = reward.reason if isinstance(reward, CallFailure) and not service.overran else None
    if failure is None and not service.sequences:
        failure = "it made no request that was answered"
    ended = not isinstance(reward, CallFailure) and not service.overran
    for sequence in sequences:
        sequence.sample = service.sample
        sequence.stopped = sequence.stopped and ended
        if not isinstance(reward, CallFailure) and sequence.turn_rewards:
            sequence.add_reward(reward)
    sequences[0].failure = failure
    return sequences


def _read_reward(result: Any) -> float | CallFailure:
    if isinstance(result, CallFailure):
        return result
    if result is None:
        return 0.0
    if not is_finite_number(result):
        return CallFailure(f"a program must return a finite number or None, it returned {shortened(repr(result))}")
    return float(result)
