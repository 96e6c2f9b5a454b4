"""Bodies of requests, checked: OpenAI's keys, and those that vLLM adds.

A key that this server does not read is refused by name, unless its value has no effect: null, or a value of
`_NEUTRAL`. All values must have the type in OpenAI's reference; nothing is converted. Numbers and counts are bounded
here, before a text is tokenized or a tensor allocated; a body is parsed on another thread than the server's event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rules import nearest_hint, require_template_variables
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.rows.files import without_nulls
from hybrid_rlhf.generation.sampling import MOST_TOP_LOGPROBS
from hybrid_rlhf.serving.web import StrictBody, beside, require_bounded_json

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
}
"""Keys of other servers, with the values that this server accepts."""
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_SUBJECT = re.compile("^(Input|List|String|Dictionary) should ")
_COUNTED = re.compile(r" after validation, not \d+$")
"""Beginning and end of pydantic's messages."""
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("reasoning_effort", "verbosity"),
)
"""Keys without an effect on an answer of this server."""
_OPTIONS = ("stream_options", "response_format")
"""Keys whose values are objects with keys of their own."""
_MOST_SAMPLES = 128
"""Limit of OpenAI on `n`."""
_MOST_PROMPTS = 4096
_MOST_MESSAGES = 8192
_MOST_TOOLS = 1024
_MOST_STOPS = 64
_MOST_STOP_CHARACTERS = 1000
MOST_STOP_TOKENS = 128
_MOST_BIASES = 1024
_MOST_VARIABLES = 64
MOST_INTEGER = 2**31 - 1
_MOST_TEMPERATURE = 100.0
_MOST_PENALTY = 100.0
_MOST_ADDED_PENALTY = 2.0
"""Limit of OpenAI on presence and frequency penalties."""
_MOST_BIAS = 100.0
"""Limit of OpenAI on `logit_bias`."""
_MOST_REWARD = 1e6
_Bias = Annotated[float, Field(ge=-_MOST_BIAS, le=_MOST_BIAS)]
_TokenIds = Annotated[list[int], Field(fail_fast=True)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=_MOST_MESSAGES)]
_Conversation = Annotated[_Objects, Field(min_length=1)]


def _named_function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)  # templates take a function alone too
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise PydanticCustomError("tool", "be {type: function, function: {name: ...}}")
    return tool


def _few_biases(biases: Any) -> Any:
    """Refuse too many before pydantic makes an error of each one."""
    if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
        raise PydanticCustomError("too_long", "have at most {most} items", {"most": _MOST_BIASES})
    return biases


_Tool = Annotated[dict[str, Any], AfterValidator(_named_function)]
_Texts = Annotated[list[str], Field(fail_fast=True, max_length=_MOST_PROMPTS)]
_StopText = Annotated[str, Field(max_length=_MOST_STOP_CHARACTERS)]
StopTexts = _StopText | Annotated[list[_StopText], Field(fail_fast=True, max_length=_MOST_STOPS)]
"""One stop string, or several."""
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "greater_than_equal": "integer_below_min_value",
    "less_than_equal": "integer_above_max_value",
    "string_too_long": "string_above_max_length",
    "too_long": "array_above_max_length",
    "too_short": "empty_array",
}
"""OpenAI's codes of errors, by pydantic's type."""
BodyT = TypeVar("BodyT", bound=StrictBody)


class KeyRejected(UserError):
    """An error in one key of a body.

    Attributes:
        key: the key, `param` of OpenAI's error object.
        code: OpenAI's code of the error.
    """

    def __init__(self, key: str, rest: str, code: str = "invalid_value") -> None:
        super().__init__(f"{key} {rest}")
        self.key = key
        self.code = code


class ContextTooLong(KeyRejected):
    """A prompt, alone or with its completion, is longer than a sequence may be."""

    def __init__(self, key: str, rest: str) -> None:
        super().__init__(key, rest, "context_length_exceeded")


class StreamOptions(StrictBody):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(StrictBody):
    """Keys that chat completions and completions share."""

    model: str
    n: int = Field(1, ge=1, le=_MOST_SAMPLES)
    max_tokens: int | None = Field(None, le=MOST_INTEGER)
    temperature: float | None = Field(None, le=_MOST_TEMPERATURE)
    top_p: float | None = None
    top_k: int | None = Field(None, le=MOST_INTEGER)
    min_p: float | None = None
    repetition_penalty: float | None = Field(None, ge=1 / _MOST_PENALTY, le=_MOST_PENALTY)
    presence_penalty: float | None = Field(None, ge=-_MOST_ADDED_PENALTY, le=_MOST_ADDED_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-_MOST_ADDED_PENALTY, le=_MOST_ADDED_PENALTY)
    logit_bias: Annotated[dict[str, _Bias], BeforeValidator(_few_biases)] | None = None
    """Biases by token id, which JSON writes as text."""
    response_format: dict[str, Any] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_tokens: int | None = Field(None, le=MOST_INTEGER)
    stop: StopTexts | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MOST_STOP_TOKENS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    """Number of most likely tokens in the answer for each token of the prompt; 0: its tokens alone."""
    return_token_ids: bool = False
    """Add the token ids of prompts and completions to the answer."""

    def sampling(self, defaults: SamplingParams, *, longest: int) -> SamplingParams:
        """The sampling parameters.

        Args:
            defaults: values for the keys that the request lacks.
            longest: largest number of tokens of a completion without a limit.

        Raises:
            KeyRejected: for a value outside of its range.
        """
        limit = self.limit
        requested: dict[str, Any] = {
            "max_new_tokens": max(1, min(defaults.max_new_tokens, longest)) if limit is None else limit,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's value for all tokens
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias and self._biases(self.logit_bias),
            "ignore_eos": self.ignore_eos or None,
            "min_new_tokens": self.min_tokens,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop and tuple(self.stop),
            "stop_token_ids": self.stop_token_ids and tuple(self.stop_token_ids),
            "seed": None if self.seed is None else self.seed % 2**63,
        }
        chosen = {name: getattr(defaults, name) if value is None else value for name, value in requested.items()}
        try:
            return SamplingParams(n=self.n, **chosen)
        except UserError as error:  # the text begins with the engine's name of the key
            name, _, rest = str(error).partition(" ")
            raise KeyRejected(self.key_of(name), rest) from None

    def _biases(self, given: Mapping[str, float]) -> dict[int, float]:
        """Biases by token id."""
        unknown = next((token for token in given if not _TOKEN_ID.fullmatch(token)), None)
        if unknown is not None:
            raise KeyRejected("logit_bias", f"must have token ids as keys, got {unknown[:40]!r}: write a number")
        return {int(token): bias for token, bias in given.items()}

    def key_of(self, parameter: str) -> str:
        """The key of this body from which a sampling parameter is read."""
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}.get(parameter, parameter)

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of a completion, if the request has a limit."""
        return self.max_tokens

    @property
    def prompt_key(self) -> str:
        """The key of the prompts."""
        return "prompt"

    @property
    def completions(self) -> int:
        """Number of completions in the answer."""
        return self.n

    @property
    def echoes(self) -> bool:
        """True if the answer begins with the prompt."""
        return False

    @property
    def generates(self) -> bool:
        """True if tokens are sampled; false for an answer that is the prompt alone."""
        return True

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens in the answer for each token; None: it has no log-probs."""
        return None

    def check(self) -> None:
        """Raise UserError for keys that exclude each other."""
        if self.prompt_logprobs is not None and self.stream:
            raise KeyRejected("prompt_logprobs", "needs stream false, got true: leave one out")


class TemplateBody(StrictBody):
    """Keys of a conversation, which the chat template reads besides its messages."""

    tools: Annotated[list[_Tool], Field(fail_fast=True, max_length=_MOST_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=_MOST_VARIABLES)] | None = None
    """Variables of the chat template, besides those of the server."""
    add_generation_prompt: bool = True
    """False: the prompt does not open a turn of the assistant."""
    continue_final_message: bool = False
    """True: the prompt ends within the last message, which is the assistant's."""


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions."""

    messages: _Objects = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, le=MOST_INTEGER)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """False limits the answer to one call."""
    prompt_token_ids: _TokenIds | None = None
    """Tokens of the prompt, used in place of rendered messages, so that an agent's turns are never tokenized again."""

    @property
    def prompt_key(self) -> str:
        """The key of the prompts: messages, or their token ids."""
        return "messages" if self.prompt_token_ids is None else "prompt_token_ids"

    @property
    def required_tools(self) -> list[dict[str, Any]]:
        """The tools among which `tool_choice` requires a call; empty if it requires none."""
        return _required_tools(self.tools or [], self.tool_choice)

    @property
    def may_call_several(self) -> bool:
        """True if a required call may be followed by others: not of a named function."""
        return self.parallel_tool_calls is not False and self.tool_choice == "required"

    @property
    def used_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template receives, without nulls, as in rows of training."""
        return None if self.tool_choice == "none" else without_nulls(self.tools) or None

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of a completion; max_completion_tokens has precedence."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def key_of(self, parameter: str) -> str:
        """The key of this body from which a sampling parameter is read."""
        key = super().key_of(parameter)
        return "max_completion_tokens" if key == "max_tokens" and self.max_completion_tokens is not None else key

    @property
    def alternatives(self) -> int | None:
        """The value of `top_logprobs`, or 0, if `logprobs` is set."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raise UserError for keys that exclude each other."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise KeyRejected(
                "top_logprobs", f"needs logprobs true, got top_logprobs {self.top_logprobs} alone: send both"
            )
        try:
            require_template_variables(self.chat_template_kwargs or {})
        except UserError as error:
            key = "chat_template_kwargs"
            raise KeyRejected(key, str(error).removeprefix(f"{key} ")) from None
        _required_tools(self.tools or [], self.tool_choice)
        if self.continue_final_message and self.messages[-1].get("role") != "assistant":
            raise KeyRejected(
                "continue_final_message",
                f"needs a last message of the assistant, got role {self.messages[-1].get('role')!r:.40}: add one",
            )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | _Texts | _TokenIds | Annotated[list[_TokenIds], Field(fail_fast=True, max_length=_MOST_PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: bool = False
    """The answer begins with the prompt, with its log-probs where they are wanted."""

    @property
    def echoes(self) -> bool:
        """The value of `echo`."""
        return self.echo

    @property
    def generates(self) -> bool:
        """False for `max_tokens: 0` with `echo`."""
        return not (self.echo and self.max_tokens == 0)

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of a completion; at least 1, also where none is sampled."""
        return self.max_tokens if self.generates else 1

    def check(self) -> None:
        """Raise UserError for keys that exclude each other."""
        super().check()
        if self.echo and self.stream:
            raise KeyRejected("echo", "needs stream false, got true: leave one out")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, text or token ids.

        Raises:
            UserError: when there is no prompt.
        """
        prompts: list[Any] = [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)
        if not prompts:
            raise KeyRejected("prompt", "must be text or token ids, got none: add one")
        return [prompts] if isinstance(prompts[0], int) else prompts

    @property
    def completions(self) -> int:
        """Number of completions of all prompts."""
        return self.n * len(self.prompts)

    @property
    def alternatives(self) -> int | None:
        """The value of `logprobs`, which may be 0."""
        return self.logprobs


class TokenizeBody(TemplateBody):
    """POST /tokenize."""

    model: str
    prompt: str | None = None
    messages: _Conversation | None = None
    """A conversation, in place of a prompt."""
    add_special_tokens: bool = True
    """Add the tokens that the tokenizer adds to plain text; a template writes its own."""
    return_token_strs: bool = False

    def conversation(self) -> ChatBody | None:
        """The conversation as a chat request; None for a plain prompt.

        Raises:
            UserError: unless there is one of the two.
        """
        if (self.prompt is None) == (self.messages is None):
            raise KeyRejected("prompt", "or messages must be sent, got both or none: send one of them")
        if self.messages is None:
            return None
        return checked(ChatBody, self.model_dump(include={*ChatBody.model_fields}))


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str
    tokens: _TokenIds


def _named_in_url(name: str) -> str:
    if {".", ".."} & {*name.split("/")}:
        raise PydanticCustomError("name", "have no part . or .., which clients remove from a URL")
    return name


class AdapterBody(StrictBody):
    """POST /v1/adapters."""

    name: Annotated[str, AfterValidator(_named_in_url)] = Field(min_length=1, max_length=200)
    """Name of the adapter in requests."""
    path: str = Field(min_length=1, max_length=1000)
    """Its peft folder, in the folder that the server allows."""


class RewardBody(StrictBody):
    """POST /episodes/NAME/reward."""

    reward: float | None = Field(ge=-_MOST_REWARD, le=_MOST_REWARD)
    """Reward of the whole episode; null: 0, for episodes whose reward a component adds."""


class ScoreBody(StrictBody):
    """POST /v1/score."""

    model: str
    messages: _Objects | Annotated[list[_Conversation], Field(fail_fast=True, max_length=_MOST_PROMPTS)] | None = None
    """A conversation that ends with the assistant's answer, or a list of them."""
    prompt: str | _Texts | None = None
    completion: str | _Texts | None = None
    """Answers to the prompts, which become user turns."""
    text_1: str | _Texts | None = None
    """vLLM's name of the prompts; a single one goes with every text of `text_2`."""
    text_2: str | _Texts | None = None
    """vLLM's name of the answers."""

    def key_of(self, place: int) -> str:
        """The key of a conversation."""
        if self.messages is None:
            return "prompt" if self.text_1 is None else "text_1"
        return "messages" if isinstance(self.messages[0], dict) else f"messages.{place}"

    def conversations(self) -> list[list[dict[str, Any]]]:
        """The conversations, each ending with an answer.

        Raises:
            UserError: when there are none, or prompts and completions do not match.
        """
        given = (self.prompt, self.completion) if self.text_1 is None else (self.text_1, self.text_2)
        prompts, completions = ([text] if isinstance(text, str) else text for text in given)
        if isinstance(self.text_1, str) and completions:
            prompts = [self.text_1] * len(completions)
        has_both = self.text_1 is not None and not (self.prompt is None and self.completion is None)
        if self.messages and prompts is None and completions is None:
            first = self.messages[0]
            return [self.messages] if isinstance(first, dict) else self.messages  # type: ignore[list-item,return-value]
        is_odd = self.messages is not None or has_both or (self.text_1 is None) != (self.text_2 is None)
        if is_odd or not prompts or not completions or len(prompts) != len(completions):
            raise KeyRejected(
                "messages",
                "must be sent, or as many prompts as completions, got "
                f"{len(self.messages or [])} messages, {len(prompts or [])} prompts and {len(completions or [])} "
                "completions: send one of them",
            )
        return [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


def _required_tools(tools: Sequence[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The tools among which a choice requires a call; empty if it requires none.

    Raises:
        UserError: for a choice that is unknown, or names a function that is not offered.
    """
    if choice in (None, "auto", "none"):
        return []
    known = [tool for tool in tools if "function" in tool]
    if choice == "required":
        chosen = known
    else:
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if name is None:
            raise KeyRejected(
                "tool_choice",
                f"must be auto, none, required or a function by name, got {choice!r:.80}: change it",
            )
        chosen = [tool for tool in known if tool["function"]["name"] == name]
    if not chosen:
        raise KeyRejected("tool_choice", f"must have a function among tools, got {choice!r:.80}: add its tool")
    return chosen


async def read_request(request: Request, kind: type[BodyT]) -> BodyT:
    """Read, parse and check the body of a request; raises as `read_body`."""
    return await beside(request, read_body, kind, await request.body())


def read_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Parse and check the body of a request.

    Raises:
        UserError: with the rule, the value and the fix.
    """
    require_bounded_json(content)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body must be JSON, got {content[:40]!r} ({error}): send JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"the body must be an object, got {type(values).__name__}: send {{...}}")
    return checked(kind, values)


def checked(kind: type[BodyT], values: dict[str, Any]) -> BodyT:
    """Check the keys and values of a body.

    Raises:
        UserError: with the rule, the value and the fix.
    """
    values = _given(kind, values)
    for name in _IGNORED:
        values.pop(name, None)
    for name, accepted in _NEUTRAL.items():
        value = values.pop(name, None)
        if value not in accepted:
            raise KeyRejected(name, f"is not supported, got {_shown(value)}: leave it out", "unsupported_parameter")
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _rejected(kind, error) from None
    if isinstance(body, GenerationBody):
        body.check()
    return body


def _given(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a body without those that are null, as clients send that write all keys of OpenAI's types; required
    keys are kept. The same holds for the keys of options."""
    given = {}
    for name, value in values.items():
        field = kind.model_fields.get(name)
        if name in _OPTIONS and isinstance(value, dict):
            value = {key: option for key, option in value.items() if option is not None}
        if value is not None or (field is not None and field.is_required()):
            given[name] = value
    return given


def _rejected(kind: type[BaseModel], error: ValidationError) -> KeyRejected:
    """The first error of a body, with all rules of its key: pydantic reports each type of a union."""
    first, *further = error.errors(include_url=False)
    place = first["loc"]
    of_key = [first, *(other for other in further if other["loc"][:1] == place[:1])]
    kind_of_error = next((other["type"] for other in of_key if not other["type"].endswith("_type")), None)
    code = "invalid_type" if kind_of_error is None else _CODES.get(kind_of_error, "invalid_value")
    fields: Mapping[str, Any] = kind.model_fields if len(place) == 1 else StreamOptions.model_fields
    key = ".".join(str(part) for part in place if isinstance(part, int) or part in kind.model_fields or part in fields)
    if first["type"] == "extra_forbidden":
        hint = nearest_hint(str(place[-1]), fields, otherwise="leave it out")
        return KeyRejected(".".join(map(str, place)), f"is an unknown key: {hint}", code)
    if first["type"] == "missing":
        return KeyRejected(key, "is required, got none: add it", code)
    rule = " or ".join(dict.fromkeys(_COUNTED.sub("", _SUBJECT.sub("", other["msg"])) for other in of_key))
    return KeyRejected(key, f"must {rule}, got {_shown(first['input'])}: change it", code)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
