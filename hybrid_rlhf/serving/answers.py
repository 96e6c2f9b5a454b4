"""OpenAI's objects for chat completions and completions, whole or streamed; with token ids like vLLM's."""

from __future__ import annotations

import codecs
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.calls import ToolCall, function_names
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.data.chat.template import ChatTemplate, is_plain
from hybrid_rlhf.generation.open_batch import StreamedToken
from hybrid_rlhf.serving.bodies import ChatBody, CompletionBody, GenerationBody
from hybrid_rlhf.serving.service import BatchEnded, Job, TokenStream
from hybrid_rlhf.serving.text_stream import ReasoningSplit, ReplyPiece, ReplyStream, TextStream
from hybrid_rlhf.serving.token_text import TokenText
from hybrid_rlhf.serving.web import json_text

_MARK_TOKENS = 16
"""Number of last tokens of a prompt among which a mark opens the reasoning of the completion."""
_ABORTED = "abort"
"""Finish reason of a completion that ends because the server stops (vLLM's name)."""


@dataclass
class AnswerPart:
    """A part of a completion, or all of it."""

    text: str = ""
    tokens: list[StreamedToken] = field(default_factory=list)
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
        self._most_calls = 1 if isinstance(body, ChatBody) and body.parallel_tool_calls is False else None
        self._is_chat = isinstance(body, ChatBody)
        # Like completion_text in data/chat/conversation.py: without a template, a space follows the role's name.
        drops_space = self._is_chat and is_plain(tokenizer)

        names = function_names(body.used_tools) if isinstance(body, ChatBody) else frozenset[str]()
        requires_call = isinstance(body, ChatBody) and bool(body.required_tools)
        template = chat_template(body, tokenizer)
        marks = None if template is None else template.thinking_marks
        header = "" if template is None or template.channels is None else template.channels.answer
        self._shown_text = text_decoder(tokenizer, body.used_tools) if isinstance(body, ChatBody) else None
        """Text without special tokens, but with marks of reasoning; None: without any."""
        is_open = False  # the prompt does not end within the reasoning
        if marks is not None:
            tail = job.prompts[0][0 if isinstance(body, ChatBody) and body.continue_final_message else -_MARK_TOKENS :]
            opened, closed = map(str(tokenizer.decode(tail)).rfind, marks)
            is_open = opened > closed

        def stream() -> ReplyStream:
            text = TextStream(self._decode, job.sampling.stop, drops_space=drops_space)
            split = None if marks is None else ReasoningSplit(*marks, is_open=is_open, header=header)
            return ReplyStream(text, names, split, requires_call=requires_call)

        self._streams = [stream() for _ in range(len(job.prompts) * job.sampling.n)]
        self._unfinished = dict.fromkeys(range(len(self._streams)))
        """Indices of the unfinished completions, in order."""
        self._offsets = [0] * len(self._streams)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._streams]
        """Decoders of the tokens' bytes, for the positions of tokens in the text."""
        self.completion_tokens = 0
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
        pieces = [AnswerPart() for _ in self._streams]
        if stream is not None:
            async for tokens in stream.steps():
                for token in tokens:
                    pieces[self._index(token)].tokens.append(token)
        for piece in pieces:
            before = self._add(piece.tokens[:-1])
            rest = self._add(piece.tokens[-1:])
            piece.text = before.text + rest.text
            piece.reasoning = before.reasoning + rest.reasoning
            piece.calls = rest.calls
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        answer = self._object("chat.completion", choices=choices, usage=self._usage())
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
            yield event(chunk(choices=[], usage=self._usage()))
        yield "data: [DONE]\n\n"

    def _object(self, kind: str, **content: Any) -> dict[str, Any]:
        """An object of the API; `kind` is that of a chat."""
        kind = kind if self._is_chat else "text_completion"
        return {**self._head, "system_fingerprint": self.version, "object": kind, **content}

    async def parts(self, stream: TokenStream) -> AsyncIterator[tuple[int, AnswerPart]]:
        """Yield the parts of all choices, by index, one for each token; when the server stops, the rest of each."""
        try:
            async for tokens in stream.steps():
                for token in tokens:
                    index = self._index(token)
                    added = self._add([token])
                    yield index, AnswerPart(added.text, [token], added.calls, added.reasoning)
                    if token.finish_reason is not None:
                        del self._unfinished[index]
        except BatchEnded:
            for index in self._unfinished:
                rest = self._streams[index].add([], "length")
                yield index, AnswerPart(rest.text, reasoning=rest.reasoning, is_aborted=True)

    def _index(self, token: StreamedToken) -> int:
        """Index of the token's choice."""
        return token.prompt * self._job.sampling.n + token.sample

    def _add(self, tokens: Sequence[StreamedToken]) -> ReplyPiece:
        """What tokens of one choice complete."""
        if not tokens:
            return ReplyPiece()
        self.completion_tokens += len(tokens)
        ids = [token.token_id for token in tokens]
        piece = self._streams[self._index(tokens[0])].add(ids, tokens[-1].finish_reason)
        return piece._replace(calls=piece.calls[: self._most_calls])

    def _choice(self, index: int, piece: AnswerPart, *, streamed: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish_reason, "logprobs": None}
        prompt = index // self._job.sampling.n
        if not self._is_chat:
            choice["text"] = self._prompt_text(prompt) + piece.text if self._body.echoes else piece.text
            if not self._body.generates:
                choice["finish_reason"] = "length"
        elif streamed:
            choice["delta"] = {"content": piece.text} if piece.text else {}
            if piece.reasoning:
                choice["delta"]["reasoning_content"] = piece.reasoning
            if piece.calls:
                choice["delta"]["tool_calls"] = _shown_calls(piece.calls, indexed=True)
        else:
            content = piece.text if piece.text or not piece.calls else None
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            if piece.reasoning:
                choice["message"]["reasoning_content"] = piece.reasoning
            if piece.calls:
                choice["message"]["tool_calls"] = _shown_calls(piece.calls)
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
        logprobs = {self._token_text.label(token.token_id): token.logprob}
        for candidate, value in token.top:
            if candidate != token.token_id:
                label = self._token_text.label(candidate)
                logprobs[f"token_id:{candidate}" if label in logprobs else label] = value
        return logprobs

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._job.prompts))
        total = prompt + self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self.completion_tokens, "total_tokens": total}

    def _decode(self, ids: list[int]) -> str:
        if self._shown_text is not None and self._body.skip_special_tokens:
            return self._shown_text(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._body.skip_special_tokens))


def chat_template(body: GenerationBody, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """The template of a request; None for plain text, or if the tokenizer has none."""
    return ChatTemplate.of(tokenizer, body.used_tools) if isinstance(body, ChatBody) else None


def _with_sampled(token: StreamedToken) -> Sequence[tuple[int, float]]:
    """The likely tokens of a position, with the sampled one, whose log-prob is its own: kernels round differently."""
    if not token.top:
        return token.top
    own = (token.token_id, token.logprob)
    if any(candidate == token.token_id for candidate, _ in token.top):
        return [own if likely[0] == token.token_id else likely for likely in token.top]
    return [*token.top, own]


def _shown_calls(calls: Sequence[ToolCall], *, indexed: bool = False) -> list[dict[str, Any]]:
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
