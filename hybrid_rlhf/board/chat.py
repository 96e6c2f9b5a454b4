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
from hybrid_rlhf.serving.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybrid_rlhf.data.chat.messages import Tools
    from hybrid_rlhf.generation import GenerationEngine
    from hybrid_rlhf.generation.open_batch import OpenBatch, StreamedToken, Submission
    from hybrid_rlhf.serving.saved_scorer import SavedScorer

Load = Callable[[InferenceConfig], "tuple[GenerationEngine, PreTrainedTokenizerBase]"]
LoadScorer = Callable[[InferenceConfig], "SavedScorer"]
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

    def __init__(self, load: Load, load_scorer: LoadScorer) -> None:
        """Take the functions that load the engine and the tokenizer of a model, and a reward model."""
        self._load = load
        self._load_scorer = load_scorer
        self._models: OrderedDict[str, ChatModel] = OrderedDict()
        self._scorer: tuple[str, SavedScorer] | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Free all models."""
        with self._lock:
            while self._models:
                self._models.popitem()[1].close()

    async def answers(
        self,
        paths: Sequence[str],
        messages: Messages,
        sampling: SamplingParams,
        reward: str | None = None,
        tools: Tools | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Events of one answer per model, as they are sampled; all models are loaded and have the prompt on return.

        Raises:
            UserError: if a model cannot be loaded, or the conversation is too long or refused by its template.
        """
        models, scorer = await asyncio.to_thread(self._loaded, tuple(dict.fromkeys(paths)), reward)
        from hybrid_rlhf.generation.open_batch import PromptBatch  # torch is imported with the first model

        chosen = [models[path] for path in paths]
        read, prompts = await asyncio.to_thread(_prompts, messages, chosen, tools)
        sampled: asyncio.Queue[tuple[int, list[StreamedToken]]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        submissions: list[tuple[ChatModel, Submission]] = []
        try:
            for number, (model, prompt) in enumerate(zip(chosen, prompts, strict=True)):

                def deliver(tokens: list[StreamedToken], number: int = number) -> None:
                    loop.call_soon_threadsafe(sampled.put_nowait, (number, tokens))

                submissions.append((model, model.batch.submit(PromptBatch([prompt], sampling), deliver)))
        except (UserError, RuntimeError) as error:
            _cancel(submissions)  # the answers of the other models are not needed
            if isinstance(error, UserError):
                raise
            path = paths[len(submissions)]  # another chat has replaced this model
            raise UserError(f"{path} is not loaded any more ({error}): ask again") from error
        return _events(sampled, submissions, sampling.stop, read, scorer)

    def _loaded(self, paths: Sequence[str], reward: str | None) -> tuple[dict[str, ChatModel], SavedScorer | None]:
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
                self._scorer = (reward, self._load_scorer(InferenceConfig(path=reward)))
            return models, self._scorer[1]


def _prompts(messages: Messages, models: Sequence[ChatModel], tools: Tools | None) -> tuple[Messages, list[list[int]]]:
    """The conversation in the form that templates read, and its tokens for each model.

    Raises:
        UserError: if it is refused by a template.
    """
    from hybrid_rlhf.data.chat.conversation import encode_prompt
    from hybrid_rlhf.serving.conversations import read_conversation, request_errors

    read = read_conversation("messages", messages)
    with request_errors("messages"):
        return read, [encode_prompt(read, model.tokenizer, tools=tools) for model in models]


def _cancel(submissions: Sequence[tuple[ChatModel, Submission]]) -> None:
    for model, submission in submissions:
        model.batch.cancel(submission)


async def _events(
    sampled: asyncio.Queue[tuple[int, list[StreamedToken]]],
    submissions: Sequence[tuple[ChatModel, Submission]],
    stop: Sequence[str],
    messages: Messages,
    scorer: SavedScorer | None,
) -> AsyncIterator[dict[str, Any]]:
    """Events until all models are done, the last of each with `done`; a client that leaves cancels them."""
    from hybrid_rlhf.data.chat.reasoning import text_decoder
    from hybrid_rlhf.data.chat.template import is_plain

    streams = [
        TextStream(
            text_decoder(model.tokenizer),
            stop,
            drops_space=is_plain(model.tokenizer),
        )
        for model, _ in submissions
    ]
    texts = [""] * len(submissions)
    unfinished = len(submissions)
    try:
        while unfinished:
            number, tokens = await sampled.get()
            if not tokens:
                raise UserError("the model was unloaded before its answer ended: ask again")
            for token in tokens:
                if piece := streams[number].add([token.token_id], token.finish_reason):
                    texts[number] += piece
                    yield {"model": number, "delta": piece}
            if tokens[-1].finish_reason is not None:
                unfinished -= 1
                value = None
                if scorer is not None and texts[number].strip():
                    scored = await asyncio.to_thread(scorer.score, [(messages, texts[number], None, None)])
                    value = sum(scored[0])
                yield {"model": number, "done": True, "score": value}
    except Exception as error:  # noqa: BLE001 - the stream reports it
        yield {"error": str(error)}
    finally:
        _cancel(submissions)
