"""Chat with saved models in this process: torch is imported and a model loaded at the first message.

At most two models and one reward model are in memory. The reward model scores answers as in training: at the end of the
conversation in its own tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import InferenceConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybrid_rlhf.generation import GenerationEngine
    from hybrid_rlhf.generation.open_batch import OpenBatch, StreamedToken, Submission

Load = Callable[[InferenceConfig], "tuple[GenerationEngine, PreTrainedTokenizerBase]"]
Score = Callable[[list[dict[str, Any]], str], float]
Messages = list[dict[str, Any]]
_MOST_MODELS = 2
_ROWS = 4
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class ChatModel:
    """A model that answers."""

    engine: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    batch: OpenBatch

    def close(self) -> None:
        """Free its memory, and end its running answers."""
        self.batch.close()
        self.engine.close()


class Chats:
    """The loaded models."""

    def __init__(self, load: Load) -> None:
        """Take the function that loads the engine and the tokenizer of a model."""
        self._load = load
        self._models: OrderedDict[str, ChatModel] = OrderedDict()
        self._scorer: tuple[str, Score] | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Free all models."""
        with self._lock:
            while self._models:
                self._models.popitem()[1].close()

    async def answers(
        self, paths: Sequence[str], messages: Messages, sampling: SamplingParams, reward: str | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Events of one answer per model, as they are sampled; all models are loaded and have the prompt on return.

        Raises:
            UserError: if a model cannot be loaded, or the conversation is too long or refused by its template.
        """
        models, score = await asyncio.to_thread(self._loaded, tuple(dict.fromkeys(paths)), reward)
        chosen = [models[path] for path in paths]
        read, prompts = await asyncio.to_thread(_prompts, messages, chosen)
        events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        queues: list[asyncio.Queue[list[StreamedToken]]] = [asyncio.Queue() for _ in chosen]
        loop = asyncio.get_running_loop()
        submissions: list[tuple[ChatModel, Submission]] = []
        try:
            for model, prompt, tokens in zip(chosen, prompts, queues, strict=True):

                def deliver(new: list[StreamedToken], tokens: asyncio.Queue[list[StreamedToken]] = tokens) -> None:
                    loop.call_soon_threadsafe(tokens.put_nowait, new)

                submissions.append((model, model.batch.submit([prompt], sampling, deliver)))
        except (UserError, RuntimeError) as error:
            _cancel(submissions)  # the answers of the other models are not needed
            if isinstance(error, UserError):
                raise
            path = paths[len(submissions)]  # another chat has replaced this model
            raise UserError(f"{path} is not loaded any more ({error}): ask again") from error
        tasks = [
            asyncio.create_task(_answer(number, model, tokens, events, sampling, read, score))
            for number, (model, tokens) in enumerate(zip(chosen, queues, strict=True))
        ]
        return _events(events, tasks, submissions)

    def _loaded(self, paths: Sequence[str], reward: str | None) -> tuple[dict[str, ChatModel], Score | None]:
        """The models of paths and the reward model; loads those that are missing."""
        with self._lock:
            for path in list(self._models):
                if path not in paths and len(self._models.keys() | set(paths)) > _MOST_MODELS:
                    self._models.pop(path).close()
            for path in paths:
                if path not in self._models:
                    engine, tokenizer = self._load(InferenceConfig(path=path))
                    self._models[path] = ChatModel(engine, tokenizer, engine.open(rows=_ROWS, max_tokens=_MOST_TOKENS))
            models = {path: self._models[path] for path in paths}
            if reward is None:
                return models, None
            if self._scorer is None or self._scorer[0] != reward:
                self._scorer = None  # free its memory before another is loaded
                self._scorer = (reward, load_scorer(reward))
            return models, self._scorer[1]


def _prompts(messages: Messages, models: Sequence[ChatModel]) -> tuple[Messages, list[list[int]]]:
    """The conversation in the form that templates read, and its tokens for each model.

    Raises:
        UserError: if it is refused by a template.
    """
    from hybrid_rlhf.data.chat.conversation import encode_prompt
    from hybrid_rlhf.serving.conversations import read_conversation, request_errors

    read = read_conversation("messages", messages)
    with request_errors("messages"):
        return read, [encode_prompt(read, model.tokenizer) for model in models]


def _cancel(submissions: Sequence[tuple[ChatModel, Submission]]) -> None:
    for model, submission in submissions:
        model.batch.cancel(submission)


def load_scorer(path: str) -> Score:
    """A function that scores a completion of a conversation by a reward model.

    Raises:
        UserError: if the model is not a reward model.
    """
    from hybrid_rlhf.configs.sections.model import ModelConfig
    from hybrid_rlhf.models.pretrained.loading import training_dtype
    from hybrid_rlhf.models.pretrained.sources import resolve_model
    from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
    from hybrid_rlhf.runtime.world import default_device, solo_world
    from hybrid_rlhf.serving.saved_scorer import SavedScorer

    device = default_device()
    source = resolve_model(path, world=solo_world(device))
    dtype = training_dtype(ModelConfig(), device)
    scorer = SavedScorer(source, load_tokenizer(source), name=path, device=device, dtype=dtype)
    return lambda messages, completion: sum(scorer.score([(messages, completion, None)])[0])


async def _answer(
    number: int,
    model: ChatModel,
    tokens: asyncio.Queue[list[StreamedToken]],
    events: asyncio.Queue[dict[str, Any] | Exception],
    sampling: SamplingParams,
    messages: Messages,
    score: Score | None,
) -> None:
    """Turn the tokens of one model into events, the last with `done`."""
    from hybrid_rlhf.serving.text_stream import TextStream

    def decode(ids: list[int]) -> str:
        return str(model.tokenizer.decode(ids, skip_special_tokens=True))

    text = ""
    stream = TextStream(decode, sampling.stop, drops_space=model.tokenizer.chat_template is None)
    try:
        ended = False
        while not ended:
            new = await tokens.get()
            if not new:
                raise UserError("the model was unloaded before its answer ended: ask again")
            for token in new:
                if piece := stream.add([token.token_id], token.finish_reason):
                    text += piece
                    events.put_nowait({"model": number, "delta": piece})
                ended |= token.finish_reason is not None
        value = None if score is None or not text.strip() else await asyncio.to_thread(score, messages, text)
        events.put_nowait({"model": number, "done": True, "score": value})
    except Exception as error:  # noqa: BLE001 - the stream reports it
        events.put_nowait(error)


async def _events(
    events: asyncio.Queue[dict[str, Any] | Exception],
    tasks: Sequence[asyncio.Task[None]],
    submissions: Sequence[tuple[ChatModel, Submission]],
) -> AsyncIterator[dict[str, Any]]:
    """Events until all models are done; a client that leaves cancels them."""
    unfinished = len(tasks)
    try:
        while unfinished:
            event = await events.get()
            if isinstance(event, Exception):
                yield {"error": str(event)}
                return
            unfinished -= "done" in event
            yield event
    finally:
        _cancel(submissions)
        for task in tasks:  # if the client has left, they would wait for tokens forever
            task.cancel()
