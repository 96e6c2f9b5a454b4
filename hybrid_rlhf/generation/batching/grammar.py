"""Grammars of completions: which tokens may come next, as bits of the vocabulary, by llguidance.

A grammar is a JSON schema, or Lark with llguidance's extensions. It is compiled once per tokenizer, and each request
has its own state. The bits of all rows are computed on other threads while the model runs, and are needed when the step
samples (workspace.py). A completion ends with a stop token, which the grammar allows where its text is complete.

Source: github.com/guidance-ai/llguidance (MIT), an optional package (the extra `serve`).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess  # nosec B404
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.batching import grammar_check
from hybrid_rlhf.generation.transfers import to_device

WORD_TOKENS = 32
"""Number of tokens whose bits are in one word."""
_SPACE = r"[ \n]{0,20}"
"""White space between the parts of JSON. It is bounded, as some models would write it for ever."""
_MOST_SECONDS = 10.0
_MOST_BYTES = 2**30
"""Limits of the compilation of an untrusted grammar."""
_KEPT_BYTES = 256 * 2**20
_TEXT_COPIES = 16
"""Bytes of a compiled grammar per character of its text, besides those that were measured."""
_LOOK_SECONDS = 0.05
"""Time between two looks whether the client of a grammar that is being compiled has left."""


class Grammar:
    """The state of one completion."""

    def __init__(self, matcher: Any) -> None:
        """Take a matcher of llguidance at the beginning of the text, which is copied."""
        self._beginning = matcher
        self.restart(())

    def append(self, token: int) -> None:
        """Take the next token.

        Raises:
            RuntimeError: if the grammar does not allow it, or reaches a limit of llguidance.
        """
        if not self.matcher.consume_token(token):
            raise RuntimeError(f"a grammar must allow the sampled token {token}: {self.matcher.get_error():.300}")

    def end(self) -> None:
        """End the text.

        Raises:
            RuntimeError: if the text is not complete: no finite one begins so, or llguidance has reached a limit.
        """
        if not self.matcher.is_accepting():
            raise RuntimeError("a grammar must have a finite text that begins with the tokens so far, it has none")

    def restart(self, tokens: Sequence[int]) -> None:
        """Go back to the beginning, and take tokens."""
        self.matcher = self._beginning.deep_copy()  # reset() keeps an error
        for token in tokens:
            self.append(token)


def source_of(response_format: Mapping[str, Any]) -> str:
    """The grammar of a response format, in Lark.

    Raises:
        UserError: for an unknown type, or a schema that is missing.
    """
    kind = response_format.get("type")
    if kind == "json_object":
        return f"start: {json_rule({'type': 'object'})}"
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping):
            raise UserError(
                f"response_format of type json_schema needs json_schema.schema, got {described!r:.80}: give it as "
                '{"json_schema": {"name": ..., "schema": {...}}}'
            )
        return f"start: {json_rule(schema)}"
    if kind == "lark" and isinstance(response_format.get("lark"), str):
        return str(response_format["lark"])
    raise UserError(
        "response_format must be of type text, json_object, json_schema or lark (with its text in lark), got "
        f"{kind!r:.80}: change it"
    )


def json_rule(schema: Mapping[str, Any]) -> str:
    """The part of a Lark grammar that matches JSON of a schema."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': _SPACE}, **schema})}"


def require_grammars() -> None:
    """Raise UserError unless llguidance is installed."""
    if find_spec("llguidance") is None:
        raise UserError("response_format needs llguidance, it is not installed: pip install 'hybrid_rlhf[serve]'")


@dataclass(eq=False)
class CompiledGrammar:
    """A grammar that is kept compiled as long as this is referred to."""

    matcher: Any
    """A matcher of llguidance at the beginning of the text."""
    size: int
    """Its bytes in memory."""


GrammarKey = tuple[str, PreTrainedTokenizerBase, int, frozenset[int]]
"""A grammar in Lark, the tokenizer and the vocabulary size of the model, and the tokens that end a completion."""


class _CompiledGrammars:
    """The compiled grammars: those that are in use, and those that were used last, up to a number of bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[GrammarKey, CompiledGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[GrammarKey, CompiledGrammar] = OrderedDict()
        self._bytes = 0

    def find(self, key: GrammarKey) -> CompiledGrammar | None:
        """A compiled grammar; None if it is not known."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._known.get(key)

    def add(self, key: GrammarKey, size: int) -> CompiledGrammar:
        """Compile a grammar, which takes this many bytes, and keep it.

        Raises:
            UserError: for a grammar that does not compile.
        """
        from llguidance import LLMatcher

        source, *of_model = key
        matcher = LLMatcher(_tokens(*of_model), source, log_level=0)
        if matcher.is_error():
            raise _refused(" ".join(matcher.get_error().split()))
        compiled = CompiledGrammar(matcher, size + _TEXT_COPIES * len(source))
        with self._lock:
            self._known[key] = compiled
            self._bytes += compiled.size - (self._kept[key].size if key in self._kept else 0)
            self._kept[key] = compiled
            while self._bytes > _KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.size
        return compiled


_grammars = _CompiledGrammars()


def grammar_of(source: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: frozenset[int]) -> Grammar:
    """A new state of a grammar, which is compiled in the first call.

    Args:
        source: the grammar, in Lark.
        tokenizer: tokenizer of the model.
        vocab_size: size of the model's vocabulary, which may be larger.
        stop: the tokens that end a completion.

    Raises:
        UserError: for a grammar that does not compile, a tokenizer that llguidance does not read, or no stop token.
    """
    key = (source, tokenizer, vocab_size, stop)
    compiled = _grammars.find(key) or _grammars.add(key, 0)
    return Grammar(compiled.matcher)


def compiled_grammar(key: GrammarKey) -> CompiledGrammar | None:
    """A grammar that is compiled already; None for another."""
    return _grammars.find(key)


def compile_untrusted(key: GrammarKey, wanted: Callable[[], bool]) -> CompiledGrammar:
    """Compile a grammar if that takes at most 10 s and 1 GiB, which another process tries first; one at a time.

    Args:
        key: the grammar, and what it is compiled for.
        wanted: returns false when the result is not needed any more.

    Raises:
        UserError: as `grammar_of`, and for a grammar that exceeds the limits, that no finite text matches, or that is
            not wanted any more.
    """
    found = _grammars.find(key)
    if found is None:
        source, tokenizer, vocab_size, stop = key
        _tokens(tokenizer, vocab_size, stop)  # checks the tokenizer
        found = _grammars.add(key, _checker(tokenizer, vocab_size).check(source, wanted))
    return found


class _Checker:
    """The process that tries grammars of one tokenizer; see grammar_check.py."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def check(self, source: str, wanted: Callable[[], bool]) -> int:
        """The bytes of a compiled grammar; raises as `compile_untrusted`."""
        with _checking:
            if not wanted():
                raise _refused("its client has left")
            process, connection = self._running or self._started()
            if process.poll() is not None:
                process, connection = self._started()
            left = False
            try:
                connection.send_bytes(json.dumps(source).encode())
                while not connection.poll(_LOOK_SECONDS):
                    if not left and not wanted():
                        left = True
                        connection.send_bytes(b"")
                answer = json.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                answer = {}
            if left:
                raise _refused("its client has left")
            if "bytes" in answer:
                return int(answer["bytes"])
            if not answer:
                process.kill()
            raise _refused(answer.get("error", "the process that compiles has ended"))

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        backend = copy.copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        connection, other_end = Pipe()
        with other_end:
            process = subprocess.Popen(  # nosec B603 - this interpreter and a file of this package
                [sys.executable, "-P", grammar_check.__file__, str(other_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "RAYON_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
                pass_fds=[other_end.fileno()],
            )
        limits = {"seconds": _MOST_SECONDS, "memory_bytes": _MOST_BYTES}
        given = {"tokenizer": backend.to_str(), "vocab_size": self._vocab_size, "stop": [0], "limits": limits}
        connection.send_bytes(json.dumps(given).encode())
        self._running = process, connection
        return self._running


_checking = threading.Lock()
_checker = functools.lru_cache(maxsize=8)(_Checker)


def _refused(reason: str) -> UserError:
    return UserError(f"response_format must be a grammar that compiles, got an error ({reason:.300}): change it")


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: frozenset[int]) -> Any:
    """The vocabulary in llguidance's form; it takes a second for a large one."""
    from llguidance import hf

    if not stop:
        raise UserError("response_format needs a stop token, the engine has none: give stop_token_ids")
    if not tokenizer.is_fast or len(tokenizer) > vocab_size:
        raise UserError(
            "response_format needs a fast tokenizer whose tokens the model has, got "
            f"{type(tokenizer).__name__} with {len(tokenizer)} tokens for {vocab_size}: use another model"
        )
    return hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(stop))  # type: ignore[arg-type]


class TokenMasks:
    """Bits of the allowed tokens of rows."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate bits for a number of rows on the host; `device` reads them."""
        from llguidance import LLExecutor

        words = -(-vocab_size // WORD_TOKENS)
        self._bits = torch.zeros(rows, words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array: np.ndarray = self._bits.numpy()
        self._executor = LLExecutor()
        self._thread = ThreadPoolExecutor(1, "token-masks")

    def begin(self, grammars: Sequence[tuple[int, Grammar]]) -> PendingMasks:
        """Begin to compute the bits of rows, given by their places and grammars."""
        matchers = [(grammar.matcher, number) for number, (_, grammar) in enumerate(grammars)]
        return PendingMasks(self._thread.submit(self._fill, matchers), [place for place, _ in grammars], self._bits)

    def _fill(self, matchers: Sequence[tuple[Any, int]]) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        if matchers:  # none: all rows have ended
            fill_next_token_bitmask_par(self._executor, list(matchers), self._array)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


@dataclass(frozen=True)
class PendingMasks:
    """Bits that are being computed."""

    done: Future[None]
    places: list[int]
    """Places of the rows."""
    bits: Tensor
    """[rows or more, words] int32."""

    def write(self, allowed: Tensor) -> None:
        """Wait, and write the bits to the table [S, words] of all rows."""
        self.done.result()
        places = to_device(self.places, allowed.device, torch.long)
        # The bits are not written again before this step's tokens have arrived.
        allowed[places] = to_device(self.bits[: len(self.places)], allowed.device)
