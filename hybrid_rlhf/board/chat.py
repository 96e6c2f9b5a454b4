"""Chat with saved models, in this process: torch is imported and a model is loaded when someone asks it.

Two models at most are in memory, and one reward model, which scores the answers as it does in training: at the end of
the conversation in its own tokens.
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
    from hybrid_rlhf.generation.open_batch import OpenBatch, StreamedToken

Load = Callable[[InferenceConfig], "tuple[GenerationEngine, PreTrainedTokenizerBase]"]
Score = Callable[[list[dict[str, Any]], str], float]
Messages = list[dict[str, Any]]
_MOST_MODELS = 2
_ROWS, _MOST_TOKENS = 4, 4096
_MEMORY_SHARE = 1 / 16
"""Largest share of the free memory that the KV cache of a model takes."""


@dataclass(frozen=True)
class ChatModel:
    """A model that answers."""

    engine: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    batch: OpenBatch

    def close(self) -> None:
        """Free its memory; answers under way end."""
        self.batch.close()
        self.engine.close()


class Chats:
    """The models that are loaded."""

    def __init__(self, load: Load) -> None:
        """Take what loads the engine and the tokenizer of a model."""
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
        """Events of one answer per model, as they are sampled; all are loaded and have the prompt when this returns.

        Raises:
            UserError: if a model cannot be loaded, or the conversation is too long or refused by its template.
        """
        models, score = await asyncio.to_thread(self._loaded, tuple(dict.fromkeys(paths)), reward)
        from hybrid_rlhf.data.chat.conversation import encode_prompt
        from hybrid_rlhf.data.chat.messages import read_message

        read = [read_message(f"messages.{place}", message) for place, message in enumerate(messages)]
        events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        submissions = []
        for number, path in enumerate(paths):
            model = models[path]
            tokens: asyncio.Queue[list[StreamedToken]] = asyncio.Queue()

            def deliver(new: list[StreamedToken], tokens: asyncio.Queue[list[StreamedToken]] = tokens) -> None:
                loop.call_soon_threadsafe(tokens.put_nowait, new)

            try:
                submission = model.batch.submit([encode_prompt(read, model.tokenizer)], sampling, deliver)
            except RuntimeError as error:  # another chat has taken its place
                raise UserError(f"{path} is not loaded any more ({error}): ask again") from error
            submissions.append((model, submission))
            work = _answer(number, model, tokens, events, sampling, read, score)
            _tasks.add(task := asyncio.create_task(work))
            task.add_done_callback(_tasks.discard)
        return _events(events, len(paths), submissions)

    def _loaded(self, paths: Sequence[str], reward: str | None) -> tuple[dict[str, ChatModel], Score | None]:
        """The models of paths and the reward model, loaded if they are not."""
        with self._lock:
            for path in list(self._models):
                if path not in paths and len(self._models.keys() | set(paths)) > _MOST_MODELS:
                    self._models.pop(path).close()
            for path in paths:
                if path not in self._models:
                    engine, tokenizer = self._load(InferenceConfig(path=path))
                    batch = engine.open(rows=_ROWS, max_tokens=_MOST_TOKENS, memory_share=_MEMORY_SHARE)
                    self._models[path] = ChatModel(engine, tokenizer, batch)
            models = {path: self._models[path] for path in paths}
            if reward is None:
                return models, None
            if self._scorer is None or self._scorer[0] != reward:
                self._scorer = None  # its memory is free before another is loaded
                self._scorer = (reward, load_scorer(reward))
            return models, self._scorer[1]


_tasks: set[asyncio.Task[None]] = set()
"""Answers under way; the loop itself keeps no task alive."""


def load_scorer(path: str) -> Score:
    """What scores a completion of a conversation by a reward model.

    Raises:
        UserError: if it is none.
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

    text, stream = "", TextStream(decode, sampling.stop, drops_space=model.tokenizer.chat_template is None)
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
    events: asyncio.Queue[dict[str, Any] | Exception], unfinished: int, submissions: list[tuple[ChatModel, Any]]
) -> AsyncIterator[dict[str, Any]]:
    """Events until all models are done; a client that leaves cancels them."""
    try:
        while unfinished:
            event = await events.get()
            if isinstance(event, Exception):
                yield {"error": str(event)}
                return
            unfinished -= "done" in event
            yield event
    finally:
        for model, submission in submissions:
            model.batch.cancel(submission)
