"""Renders conversations as text with the tokenizer's chat template, or in a plain format without one.

The template receives everything in a message, such as reasoning, tool calls and names, and the row's tools. Model
families expect different formats: content as text or as a list of parts, arguments of tool calls as a mapping or as
JSON text, the content of a turn with only tool calls missing, empty or null. Test messages, rendered once per template,
detect the formats that it renders. What a template does not support becomes the nearest equivalent: a system prompt
precedes the first user text (as in Gemma's documentation), a tool result is a user turn, a tool call is JSON text.

Without a template, turns are `Human:` and `Assistant:` paragraphs, as in DeepSpeed-Chat, and assistant turns end with
EOS. A tokenizer that is saved gets a template that writes the same, for other programs; here it counts as none.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.forms import MISSING, MessageForms, text_with_calls
from hybrid_rlhf.data.chat.messages import REASONING_KEYS, WEIGHT_KEY, Message, Tools, split_reasoning
from hybrid_rlhf.data.images.expansion import IMAGE_MARK

_PLAIN_NAMES = {
    "system": "System",
    "developer": "System",
    "user": "Human",
    "assistant": "Assistant",
    "tool": "Tool",
    "function": "Tool",
    "ipython": "Tool",
    "observation": "Tool",
}
_PLAIN = (
    f"{{%- set names = {_PLAIN_NAMES} -%}}"
    "{%- for message in messages -%}"
    "{%- set turn = namespace(text=message['content'] or '') -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set turn.text = turn.text + ('\\n' if turn.text else '') + (call['function'] | tojson) -%}"
    "{%- endfor -%}"
    "{{- names[message['role']] + ': ' + turn.text -}}"
    "{{- (eos_token if message['role'] == 'assistant' else '') + '\\n\\n' -}}"
    "{%- endfor -%}"
    "{{- 'Assistant:' if add_generation_prompt else '' -}}"
)
"""What `render` writes without a template, as one."""
WITHOUT_TEMPLATE = "has no chat template: turns become paragraphs that begin with Human: and Assistant:"
_NEAREST = {
    "system": ("system",),
    "developer": ("developer", "system"),
    "tool": ("tool",),
    "function": ("function", "tool"),
    "ipython": ("ipython", "tool"),
    "observation": ("observation", "tool"),
}
"""Replacements of each role, in order of preference, if the template supports them; otherwise user."""
_RENDERED = {
    *("messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    "return_assistant_tokens_mask",
}
"""Variables that rendering sets."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
CLOSES_THINKING = re.compile(r"</[\w:]*think\w*>|\[/THINK\]|◁/think▷|<channel\|>", re.IGNORECASE)
"""The texts that close reasoning in chat templates."""
THINKING_MARK = re.compile(
    rf"<[\w:]*think\w*>|\[THINK\]|◁think▷|<\|channel>\w+|{CLOSES_THINKING.pattern}", re.IGNORECASE
)
"""The texts that open or close it."""
_PROBE = "q7saidq7"
"""Content that no template contains."""
_UNFINISHED = "q7goesonq7 "
"""Marks the end of content; the space shows whether the template keeps it."""
_ROLE_PROBE = "q7toldq7"
"""Another one."""
_USER: Message = {"role": "user", "content": "q7askedq7"}
_ASSISTANT: Message = {"role": "assistant", "content": _PROBE}
_THINKING: Message = {**_ASSISTANT, REASONING_KEYS[0]: _ROLE_PROBE}
_CALL_ID = "q7callid7"
SYSTEM_TURN: Message = {"role": "system", "content": "c"}
"""Precedes turns that a template refuses without a system prompt."""
_CALL: Message = {
    "role": "assistant",
    "tool_calls": [
        {"type": "function", "id": _CALL_ID, "function": {"name": "q7nameq7", "arguments": {"k": _PROBE}}},
    ],
}


class Channels(NamedTuple):
    """The headers of the messages of which a turn consists (gpt-oss, Muse Glimmer)."""

    reasoning: str
    """Text before reasoning."""
    answer: str
    """Text before the answer."""
    end: str
    """Text between the messages of a turn."""

    def apart(self, message: Message) -> Message:
        """A turn whose content is the text of a completion, with reasoning and answer under their keys."""
        headers = f"{re.escape(self.reasoning)}|{re.escape(self.answer)}"
        before, *parts = re.split(f"(?:^|{re.escape(self.end)})({headers})", str(message["content"]))
        if before or not parts or self.answer in parts[:-2] or parts[-2] != self.answer:
            return message
        texts = parts[1::2]
        thought = {REASONING_KEYS[0]: "\n".join(texts[:-1])} if texts[:-1] else {}
        return {**thought, **message, "content": texts[-1]}


class ChatTemplate:
    """A chat template with the special tokens it writes; created by `ChatTemplate.of`."""

    _known: ClassVar[WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, ChatTemplate]]] = WeakKeyDictionary()

    def __init__(self, source: str, variables: Mapping[str, Any], special_tokens: Sequence[str]) -> None:
        self._source = source
        self._variables = variables
        self._words = set(re.findall(r"\w+", _COMMENT.sub("", source)))
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        """Matches a special token."""
        self.marks_generation = _GENERATION.search(source) is not None
        """True if the template marks generated text with `{% generation %}`."""
        self._roles: dict[str, str] = {}
        self._openings: dict[str, str] = {}
        self.known_losses: dict[bytes, list[str]] = {}
        """What is lost of a conversation, by the digest of its form; see unrendered.py."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None) -> ChatTemplate | None:
        """The template for a conversation with these tools; None if the tokenizer has none."""
        if is_plain(tokenizer):
            return None
        source = tokenizer.get_chat_template(None, tools)
        variables = tokenizer.special_tokens_map
        known = cls._known.setdefault(tokenizer, {})
        key = (source, str(variables), len(tokenizer))
        if key not in known:
            known[key] = cls(source, variables, special_tokens(tokenizer))
        return known[key]

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages as text, with further variables of the template.

        Raises:
            UserError: if the template does not compile or rejects the messages.
        """
        text = self._render(self._normalised(messages), tools, add_generation_prompt, variables)[0]
        return self._with_marks(messages, text, [])[0]

    @cached_property
    def channels(self) -> Channels | None:
        """The channels of a turn; None if reasoning and answer are not messages of their own."""
        prompt = self._try_render(_USER, add_generation_prompt=True)
        answer = self._try_render(_USER, _ASSISTANT)
        thought = self._try_render(_USER, _THINKING)
        if not (answer.startswith(prompt) and thought.startswith(prompt)):
            return None
        header = answer[len(prompt) :].partition(_PROBE)[0]
        opening, _, rest = thought[len(prompt) :].partition(_ROLE_PROBE)
        between = rest.partition(_PROBE)[0]
        is_message = self.special.search(header) is not None and between.endswith(header)
        return Channels(opening, header, between.removesuffix(header)) if is_message else None

    @cached_property
    def thinking_marks(self) -> tuple[str, str] | None:
        """The texts that open and close reasoning, as the template writes them; None if it writes none."""
        if self.channels is not None:
            return self.channels.reasoning, self.channels.end
        match = CLOSES_THINKING.search(self._source)
        if match is None:
            return None
        return ("<|channel>thought" if match[0] == "<channel|>" else match[0].replace("/", "", 1)), match[0]

    def generated(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[str, list[tuple[int, int]]]:
        """Messages as text, and the character ranges of its `{% generation %}` blocks."""
        return self._with_marks(messages, *self._render(self._normalised(messages), tools))

    @cached_property
    def _image_text(self) -> str:
        """The text of an image in a turn; empty if the template writes none."""
        turns = [{**_USER, "content": IMAGE_MARK * count + _PROBE} for count in (1, 2)]
        one, two = map(self._try_render, turns)
        start = len(os.path.commonprefix([one, two]))
        second = two[start : start + len(two) - len(one)]
        # Images may be numbered (`add_vision_id` of Qwen): their text is what follows the number.
        return os.path.commonprefix([two[:start][::-1], second[::-1]])[::-1]

    def _with_marks(
        self, messages: Sequence[Message], text: str, spans: list[tuple[int, int]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """A rendered text with a mark before each image, and character ranges in it.

        Raises:
            UserError: if the template does not write each image.
        """
        count = sum(str(message.get("content")).count(IMAGE_MARK) for message in messages)
        if not count:
            return text, spans
        pattern = re.escape(self._image_text) or "(?!)"
        starts = [match.start() for match in re.finditer(pattern, text)]
        if len(starts) != count:
            raise UserError(
                f"the chat template must write each image of a conversation once, it writes {len(starts)} of {count}: "
                "set data.chat_template to the template of a vision-language model"
            )
        marked = re.sub(pattern, lambda match: IMAGE_MARK + match[0], text)
        moved = lambda place: place + len(IMAGE_MARK) * bisect_left(starts, place)  # noqa: E731
        return marked, [(moved(begin), moved(stop)) for begin, stop in spans]

    @cached_property
    def call_text(self) -> str:
        """The text of a conversation with a tool call; empty if the template refuses it."""
        return self._try_render(_USER, _CALL)

    @cached_property
    def turn_suffix(self) -> str | None:
        """The text after the content of a final assistant turn; None if the template does not render the content."""
        _, shown, suffix = self._try_render(_USER, _ASSISTANT).rpartition(_PROBE)
        return suffix if shown else None

    @property
    def end_token(self) -> str | None:
        """The special token that ends an assistant turn; None if there is none."""
        match = self.special.search((self.turn_suffix or "") + self.turn_opening("user"))
        return None if match is None else match[0]

    def turn_opening(self, role: str) -> str:
        """The special token that opens a turn after an assistant turn, with preceding whitespace; empty if there is
        none."""
        if role not in self._openings:
            turns = (_USER, _ASSISTANT if role == "user" else _CALL)
            before, after = self._try_render(*turns), self._try_render(*turns, _probe_turn(role))
            rest = after[len(before) :] if before and after.startswith(before) else ""
            whitespace = len(rest) - len(rest.lstrip())
            match = self.special.match(rest, whitespace)
            is_opening = match is not None and match[0] != self._variables.get("bos_token")
            self._openings[role] = rest[: match.end()] if match is not None and is_opening else ""
        return self._openings[role]

    def unread(self, message: Message) -> list[str]:
        """The keys of a message that do not occur in the template's code, and its role if another takes its place."""
        missing = [key for key in content_keys(message) if key not in self._words]
        return missing + ([f"role {message['role']}"] if self._role(message["role"]) != message["role"] else [])

    @cached_property
    def closes_thinking(self) -> bool:
        """True if the generation prompt closes the thinking block."""
        prompt = self._try_render(_USER, add_generation_prompt=True)
        *_, last = [None, *CLOSES_THINKING.finditer(prompt)]
        return last is not None and not prompt[last.end() :].strip()

    @cached_property
    def _renders_reasoning(self) -> bool:
        """True if the template renders the reasoning of an answer from its key."""
        return _ROLE_PROBE in self._try_render(_USER, _THINKING)

    def with_reasoning_key(self, message: Message) -> Message:
        """A message whose content begins with reasoning, with that under its key if the template renders the key: it
        writes its own marks, and may write an empty block before those in the content."""
        if message["role"] == "assistant" and self.special.search(str(message.get("content"))) and self.channels:
            message = self.channels.apart(message)
        if "</think>" not in str(message.get("content")) or any(key in message for key in REASONING_KEYS):
            return message
        reasoning, rest = split_reasoning(message)
        return {**rest, REASONING_KEYS[0]: reasoning} if reasoning and self._renders_reasoning else message

    def _normalised(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the formats and roles that the template supports; joins a replaced user turn with its
        neighbour."""
        normalised: list[Message] = []
        is_replaced = False
        for message in messages:
            role = self._role(message["role"])
            is_replaced, was_replaced = role == "user" != message["role"], is_replaced
            if (is_replaced or was_replaced) and role == "user" and normalised and normalised[-1]["role"] == "user":
                joined = f"{normalised[-1]['content']}\n\n{message['content']}"
                normalised[-1] = {**normalised[-1], "content": joined}
                is_replaced = True
            else:
                normalised.append({key: message[key] for key in message if key != WEIGHT_KEY} | {"role": role})
        return [self._forms.apply(self.with_reasoning_key(message)) for message in normalised]

    def _role(self, role: str) -> str:
        """The nearest role that the template supports."""
        if role not in self._roles:
            self._roles[role] = role
            if role in _NEAREST:
                shown = [name for name in _NEAREST[role] if self._shows(name)]
                self._roles[role] = (shown or ["user"])[0]
        return self._roles[role]

    def _shows(self, role: str) -> bool:
        """Return True if the template renders the text of a role's turn, also before an assistant turn."""
        turns = [_probe_turn(role), _USER] if role in ("system", "developer") else [_USER, _CALL, _probe_turn(role)]
        return _ROLE_PROBE in self._text_or_empty([self._forms.apply(turn) for turn in (*turns, _ASSISTANT)])

    @cached_property
    def _forms(self) -> MessageForms:
        parts = False
        nones = 0
        for form in (False, True):
            shown = self._text_or_empty([MessageForms(form).apply(turn) for turn in (_USER, _ASSISTANT)])
            if _PROBE in shown:
                parts = form
                nones = shown.count("None")
                break
        for as_text, empty in product((False, True), (MISSING, "", None)):
            calling = MessageForms(parts, False, as_text, empty)
            text = self._text_or_empty([calling.apply(turn) for turn in (_USER, _CALL)])
            if "q7nameq7" in text and _PROBE in text and '\\"' not in text and text.count("None") <= nones:
                return calling
        return MessageForms(parts)

    def _try_render(self, *messages: Message, add_generation_prompt: bool = False) -> str:
        return self._text_or_empty(self._normalised(messages), add_generation_prompt)

    def _text_or_empty(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of turns, after a system prompt where the template needs one; empty if it refuses both."""
        for turns in (messages, [SYSTEM_TURN, *messages]):
            with contextlib.suppress(UserError):
                return self._render(turns, None, add_generation_prompt)[0]
        return ""

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        taken = sorted(_RENDERED & (variables or {}).keys())
        if taken:
            raise UserError(
                f"chat_template_kwargs must not have what rendering sets, got {', '.join(taken)}: leave it out"
            )
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=self.marks_generation,
                **{**self._variables, **(variables or {})},
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template must compile, got an error in line {error.lineno} ({error.message}): fix it in the "
                "tokenizer's folder, or set data.chat_template"
            ) from error
        except Exception as error:  # noqa: BLE001 - templates raise errors of jinja and of their own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"the chat template must accept the conversation, got an error for the roles "
                f"{[m['role'] for m in messages]} ({reason}): change the turns, or set data.chat_template"
            ) from error
        return texts[0], spans[0] if spans else []


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation as text, including special tokens; BOS only if the template writes it.

    Args:
        messages: the turns.
        tokenizer: its chat template renders them.
        tools: JSON schemas of the functions that the assistant may call.
        add_generation_prompt: end the text with the beginning of an assistant turn.
        variables: further variables of the template; without a template, they have no effect.

    Raises:
        UserError: if the template does not compile or rejects the messages.
    """
    if not messages and not add_generation_prompt:
        return ""
    template = ChatTemplate.of(tokenizer, tools)
    if template is not None:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt, variables=variables)
    if any(IMAGE_MARK in str(message.get("content")) for message in messages):
        raise UserError(
            "images need a chat template, the tokenizer has none: set data.chat_template to that of the model"
        )
    parts = []
    for message in messages:
        end = tokenizer.eos_token if message["role"] == "assistant" else ""
        parts.append(f"{_PLAIN_NAMES[message['role']]}: {text_with_calls(message)}{end}\n\n")
    return "".join(parts) + (f"{_PLAIN_NAMES['assistant']}:" if add_generation_prompt else "")


def render_unfinished(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation up to the end of its last content, which a completion then continues.

    As in transformers' `continue_final_message`, whitespace at the end of the content is kept if the template keeps it.

    Raises:
        UserError: if the text does not contain that content as it is.
    """
    template = ChatTemplate.of(tokenizer, tools)
    last = messages[-1] if template is None else template.with_reasoning_key(messages[-1])
    content = str(last.get("content", ""))
    marked = {**last, "content": content + _UNFINISHED}
    text, found, rest = render([*messages[:-1], marked], tokenizer, tools=tools, variables=variables).rpartition(
        _UNFINISHED.strip()
    )
    if (
        "tool_calls" in last
        or not str(messages[-1].get("content", "")).strip()
        or not found
        or content.strip() not in text
    ):
        raise UserError(
            "a last assistant turn is continued, and must have content that the template writes and no tool calls, got "
            f"{content[:40]!r}: change it, or end with a user or tool turn"
        )
    return text if rest.startswith(" ") else text.rstrip()


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of rendered text; without a chat template, with BOS if the tokenizer adds it."""
    return [*leading_bos(text, tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]


def leading_bos(text: str, tokenizer: PreTrainedTokenizerBase, *, plain: bool | None = None) -> list[int]:
    """[BOS] if a text needs it before its own tokens, otherwise [].

    A chat template writes BOS itself. Plain text gets it if the tokenizer adds it by default, and never twice.

    Args:
        text: the text, to be tokenised without special tokens.
        tokenizer: tokenizer of the model.
        plain: true if the text has not been rendered by a template; None: true if the tokenizer has no template.
    """
    plain = is_plain(tokenizer) if plain is None else plain
    bos = tokenizer.bos_token_id
    if not plain or bos is None or text.startswith(str(tokenizer.bos_token)):
        return []
    return [int(bos)] if tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [bos] else []


def is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer has no chat template, or only that of `set_plain_template`."""
    template = tokenizer.chat_template
    return template is None or (isinstance(template, str) and template.endswith(_PLAIN))


def set_plain_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a chat template one that writes the tokens of `render`, for programs that read it where
    it is saved."""
    begins = "{{- bos_token -}}" if leading_bos("", tokenizer) else ""
    tokenizer.chat_template = begins + _PLAIN


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """All tokens that decoding can skip as special, with or without a name in the tokenizer."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted({*added, *tokenizer.all_special_tokens}))


def content_keys(message: Message) -> list[str]:
    """The keys of a message that have a value, except role, content, reasoning and weight."""
    apart = ("role", "content", WEIGHT_KEY, *REASONING_KEYS)
    return [key for key in message if has_value(message, key) and key not in apart]


def has_value(message: Message, key: str) -> bool:
    """Return True if a key of a message is not missing, null or empty; false and 0 are values."""
    value = message.get(key)
    return bool(value) or isinstance(value, (bool, int, float))


def _probe_turn(role: str) -> Message:
    """A test message with a role."""
    call = {"name": "q7nameq7", "tool_call_id": _CALL_ID} if role not in ("user", "system", "developer") else {}
    return {"role": role, "content": _ROLE_PROBE, **call}
