"""OpenAI's objects for chat completions and completions, whole or streamed; with token ids like vLLM's."""

from __future__ import annotations

import codecs
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.calls import ToolCall, function_names
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.data.chat.template import ChatTemplate, is_plain
from hybrid_rlhf.generation.open_batch import StreamedToken
from hybrid_rlhf.serving.bodies import ChatBody, CompletionBody, GenerationBody
from hybrid_rlhf.serving.service import BatchEnded, Job, TokenStream
from hybrid_rlhf.serving.text_stream import ReasoningSplit, ReplyStream, TextStream
from hybrid_rlhf.serving.token_text import TokenText
from hybrid_rlhf.serving.web import json_text

_MARK_TOKENS = 16
"""Number of last tokens of a prompt among which a mark opens the reasoning of the completion."""
_ABORTED = "abort"
"""Finish reason of a completion that ends because the server stops (vLLM's name)."""


@dataclass(frozen=True)
class AnswerPart:
    """A part of a completion, or all of it."""

    text: str = ""
    tokens: Sequence[StreamedToken] = ()
    calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    is_aborted: bool = False
    """True if the completion ends because the server stops."""

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the last token; tool_calls if the completion ends with calls."""
        if self.is_aborted:
            return _ABORTED
        reason = self.tokens[-1].finish_reason if self.tokens else None
        return "tool_calls" if self.calls and reason == "stop" else reason


class Answer:
    """The answer to one request."""

    def __init__(
        self, body: GenerationBody, job: Job, tokenizer: PreTrainedTokenizerBase, token_text: TokenText
    ) -> None:
        """Take the request, its prompts and sampling, the tokenizer of the text, and the text of single tokens."""
        self._body = body
        self.version: str | None = None
        """Version of the weights or of the adapter."""
        self.echoed: list[list[StreamedToken]] = []
        """Tokens of each prompt with their log-probs, if the answer has them."""
        self._job = job
        self._tokenizer = tokenizer
        self._token_text = token_text
        chat = body if isinstance(body, ChatBody) else None
        self._most_calls = 1 if chat is not None and chat.parallel_tool_calls is False else None
        self._is_chat = chat is not None
        # Like completion_text in data/chat/conversation.py: without a template, a space follows the role's name.
        drops_space = self._is_chat and is_plain(tokenizer)

        names = function_names(None if chat is None else chat.used_tools)
        is_constrained = job.sampling.response_format is not None  # that of an episode is not, whatever it asks for
        requires_call = is_constrained and chat is not None and bool(chat.required_tools)
        template = chat_template(body, tokenizer)
        marks = None if template is None else template.thinking_marks
        header = "" if template is None or template.channels is None else template.channels.answer
        self._shown_text = None if chat is None else text_decoder(tokenizer, chat.used_tools)
        """Text without special tokens, but with marks of reasoning; None: without any."""
        is_open = False  # the prompt does not end within the reasoning
        if marks is not None:
            tail = job.prompts[0][0 if chat is not None and chat.continue_final_message else -_MARK_TOKENS :]
            opened, closed = map(str(tokenizer.decode(tail)).rfind, marks)
            is_open = opened > closed

        def stream() -> ReplyStream:
            text = TextStream(self._decode, job.sampling.stop, drops_space=drops_space)
            split = None if marks is None else ReasoningSplit(*marks, is_open=is_open, header=header)
            return ReplyStream(text, names, split, requires_call=requires_call)

        self._streams = [stream() for _ in range(len(job.prompts) * job.sampling.n)]
        self._offsets = [0] * len(self._streams)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._streams]
        """Decoders of the tokens' bytes, for the positions of tokens in the text."""
        self._completion_tokens = 0
        """Number of tokens of all choices so far."""
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(self, stream: TokenStream | None) -> dict[str, Any]:
        """The complete answer, after the last token; without a stream, the answer is the prompts alone.

        Text is decoded at the end: decoding between two steps would delay the batch, as Python runs one thread at a
        time.
        """
        sampled: list[list[StreamedToken]] = [[] for _ in self._streams]
        if stream is not None:
            async for step in stream.steps():
                for token in step:
                    sampled[self._index(token)].append(token)
        choices = []
        for index, tokens in enumerate(sampled):
            before = self._add(tokens[:-1])
            rest = self._add(tokens[-1:])
            part = AnswerPart(before.text + rest.text, tokens, rest.calls, before.reasoning + rest.reasoning)
            choices.append(self._choice(index, part))
        answer = self._object("chat.completion", choices=choices, usage=self.usage())
        if self._is_chat and self._body.return_token_ids:
            answer["prompt_token_ids"] = self._job.prompts[0]
        return answer

    async def events(self, stream: TokenStream) -> AsyncIterator[str]:
        """Server-sent events; the last one is `[DONE]`."""
        options = self._body.stream_options
        wants_tokens = self._body.alternatives is not None or self._body.return_token_ids
        usage = {"usage": None} if options is not None and options.include_usage else {}
        chunk = partial(self._object, "chat.completion.chunk")
        if self._is_chat:
            ids = {"prompt_token_ids": self._job.prompts[0]} if self._body.return_token_ids else {}
            for index in range(len(self._streams)):
                delta = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
                yield event(chunk(**ids, choices=[choice], **usage))
        async for index, part in self.parts(stream):
            if part.text or part.reasoning or part.finish_reason or wants_tokens:
                yield event(chunk(choices=[self._choice(index, part, streamed=True)], **usage))
        if usage:
            yield event(chunk(choices=[], usage=self.usage()))
        yield "data: [DONE]\n\n"

    def _object(self, kind: str, **content: Any) -> dict[str, Any]:
        """An object of the API; `kind` is that of a chat."""
        kind = kind if self._is_chat else "text_completion"
        return {**self._head, "system_fingerprint": self.version, "object": kind, **content}

    async def parts(self, stream: TokenStream) -> AsyncIterator[tuple[int, AnswerPart]]:
        """Yield the parts of all choices, by index, one for each token; when the server stops, the rest of each."""
        unfinished = dict.fromkeys(range(len(self._streams)))
        try:
            async for tokens in stream.steps():
                for token in tokens:
                    index = self._index(token)
                    yield index, self._add([token])
                    if token.finish_reason is not None:
                        del unfinished[index]
        except BatchEnded:
            for index in unfinished:
                rest = self._streams[index].add([], "length")
                yield index, AnswerPart(rest.text, reasoning=rest.reasoning, is_aborted=True)

    def _index(self, token: StreamedToken) -> int:
        """Index of the token's choice."""
        return token.prompt * self._job.sampling.n + token.sample

    def _add(self, tokens: Sequence[StreamedToken]) -> AnswerPart:
        """The part of one choice that tokens complete."""
        if not tokens:
            return AnswerPart()
        self._completion_tokens += len(tokens)
        ids = [token.token_id for token in tokens]
        piece = self._streams[self._index(tokens[0])].add(ids, tokens[-1].finish_reason)
        return AnswerPart(piece.text, tokens, piece.calls[: self._most_calls], piece.reasoning)

    def _choice(self, index: int, piece: AnswerPart, *, streamed: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish_reason, "logprobs": None}
        prompt = index // self._job.sampling.n
        if not self._is_chat:
            choice["text"] = self._prompt_text(prompt) + piece.text if self._body.echoes else piece.text
            if not self._body.generates:
                choice["finish_reason"] = "length"
        else:
            if streamed:
                said: dict[str, Any] = {"content": piece.text} if piece.text else {}
            else:
                content = piece.text if piece.text or not piece.calls else None
                said = {"role": "assistant", "content": content, "refusal": None}
            if piece.reasoning:
                said["reasoning_content"] = piece.reasoning
            if piece.calls:
                said["tool_calls"] = _shown_calls(piece.calls, indexed=streamed)
            choice["delta" if streamed else "message"] = said
        if self._body.alternatives is not None:
            tokens = [*(self.echoed[prompt] if self.echoed else ()), *piece.tokens]
            choice["logprobs"] = self._chat_logprobs(piece) if self._is_chat else self._text_logprobs(index, tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = [token.token_id for token in piece.tokens]
            if not self._is_chat:
                choice["prompt_token_ids"] = self._job.prompts[prompt]
        return choice

    def _chat_logprobs(self, piece: AnswerPart) -> dict[str, Any]:
        shown = []
        for token in piece.tokens:
            top = [self._shown_logprob(*likely) for likely in _with_sampled(token)]
            shown.append({**self._shown_logprob(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": shown, "refusal": None}

    def _shown_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        known = self._token_text
        return {"token": known.text(token), "logprob": logprob, "bytes": list(known.content(token))}

    def prompt_logprobs(self, tokens: Sequence[StreamedToken], top: int) -> list[dict[str, Any] | None]:
        """Log-probs of a prompt's tokens in vLLM's form, with the `top` most likely ones; None for the first token."""
        shown = list[dict[str, Any] | None]([None])
        for token in tokens[1:]:
            own = {token.token_id: token.logprob}  # the kernels of the likely ones round differently
            likely = own | dict(token.top[:top]) | own
            shown.append(
                {
                    str(candidate): {"logprob": value, "decoded_token": self._tokenizer.decode([candidate])}
                    for candidate, value in likely.items()
                }
            )
        return shown

    def _prompt_text(self, prompt: int) -> str:
        """The text of a prompt, as it was sent, or decoded."""
        assert isinstance(self._body, CompletionBody)
        sent = self._body.prompts[prompt]
        return sent if isinstance(sent, str) else self._decode(sent)

    def _text_logprobs(self, index: int, tokens: Sequence[StreamedToken]) -> dict[str, Any]:
        known = self._token_text
        texts = list[str]()
        offsets = list[int]()
        for token in tokens:
            texts.append(known.label(token.token_id))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(known.content(token.token_id)))
        values = [None if math.isnan(token.logprob) else token.logprob for token in tokens]  # that of the first token
        top = [self._labelled(token) for token in tokens] if self._job.top_logprobs else None
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _labelled(self, token: StreamedToken) -> dict[str, float] | None:
        """Log-probs of the likely tokens by label; a token whose label is already used is named by its id. None for the
        first token of a prompt."""
        if math.isnan(token.logprob):
            return None
        own = {token.token_id: token.logprob}
        logprobs = dict[str, float]()
        for candidate, value in (own | dict(token.top) | own).items():
            label = self._token_text.label(candidate)
            logprobs[f"token_id:{candidate}" if label in logprobs else label] = value
        return logprobs

    def usage(self) -> dict[str, int]:
        """Numbers of tokens so far."""
        prompt = sum(map(len, self._job.prompts))
        total = prompt + self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self._completion_tokens, "total_tokens": total}

    def _decode(self, ids: list[int]) -> str:
        if self._shown_text is not None and self._body.skip_special_tokens:
            return self._shown_text(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._body.skip_special_tokens))


def chat_template(body: GenerationBody, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """The template of a request; None for plain text, or if the tokenizer has none."""
    return ChatTemplate.of(tokenizer, body.used_tools) if isinstance(body, ChatBody) else None


def _with_sampled(token: StreamedToken) -> Sequence[tuple[int, float]]:
    """The likely tokens of a position, with the sampled one, whose log-prob is its own: kernels round differently."""
    return [*(dict(token.top) | {token.token_id: token.logprob}).items()] if token.top else []


def _shown_calls(calls: Sequence[ToolCall], *, indexed: bool) -> list[dict[str, Any]]:
    return [
        {
            **({"index": place} if indexed else {}),
            "id": uuid.uuid4().hex[:9],  # Mistral's templates take nine letters or digits
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for place, call in enumerate(calls)
    ]


def event(content: dict[str, Any]) -> str:
    """A server-sent event with JSON data."""
    return f"data: {json_text(content)}\n\n"
