"""Conversations as text, by the tokenizer's chat template, or plainly where there is none.

Everything a message carries reaches the template: reasoning, tool calls, names, and the row's tools. Families disagree
on forms: content is text or a list of parts; a tool call's arguments are a mapping or JSON text; the content of a turn
that only calls tools is missing, empty or none. Probes, rendered once a template, find the forms that it shows. What a
template has no place for is shown in the nearest one: a system prompt before the first user's text (as Gemma's
documentation does), a tool's result as a turn of the user, a tool call as JSON text.

Without a template, turns are `Human:` and `Assistant:` paragraphs, as in DeepSpeed-Chat, and an answer ends with eos.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.forms import MISSING, Forms, text_with_calls
from hybrid_rlhf.data.messages import REASONING_KEYS, Message, Tools

_PLAIN_NAMES = {
    "system": "System", "developer": "System", "user": "Human", "assistant": "Assistant", "tool": "Tool",
    "function": "Tool", "ipython": "Tool", "observation": "Tool",
}  # fmt: skip
_NEAREST = {
    "system": ("system",), "developer": ("developer", "system"), "tool": ("tool",), "function": ("function", "tool"),
    "ipython": ("ipython", "tool"), "observation": ("observation", "tool"),
}  # fmt: skip
"""Roles in whose place a message may stand; after them the user's."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_PROBE = "q7saidq7"
_USER: Message = {"role": "user", "content": "q7askedq7"}
_ANSWER: Message = {"role": "assistant", "content": _PROBE}
_CALL_ID = "q7callid7"
_CALL: Message = {
    "role": "assistant",
    "tool_calls": [
        {"type": "function", "id": _CALL_ID, "function": {"name": "q7nameq7", "arguments": {"k": _PROBE}}},
    ],
}


class ChatTemplate:
    """One template with the special tokens it writes; made by `ChatTemplate.of`."""

    _known: ClassVar[WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, ChatTemplate]]] = WeakKeyDictionary()

    def __init__(self, source: str, variables: Mapping[str, Any], special_tokens: Sequence[str]) -> None:
        self._source, self._variables = source, variables
        self._words = set(re.findall(r"\w+", _COMMENT.sub("", source)))
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        """Matches a special token."""
        self.marks_generation = _GENERATION.search(source) is not None
        """Whether the template marks what the assistant generates, by `{% generation %}`."""
        self._roles: dict[str, str] = {}
        self._openings: dict[str, str] = {}

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None) -> ChatTemplate | None:
        """The template for a conversation with these tools; None where the tokenizer has none."""
        if tokenizer.chat_template is None:
            return None
        source, variables = tokenizer.get_chat_template(None, tools), tokenizer.special_tokens_map
        known = cls._known.setdefault(tokenizer, {})
        key = (source, str(variables), len(tokenizer))
        if key not in known:
            known[key] = cls(source, variables, special_tokens(tokenizer))
        return known[key]

    def render(
        self, messages: Sequence[Message], tools: Tools | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Messages as text.

        Raises:
            UserError: when the template does not compile, or refuses the messages.
        """
        return self._render(self._formed(messages), tools, add_generation_prompt)[0]

    def generated(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[str, list[tuple[int, int]]]:
        """Messages as text, and where `{% generation %}` blocks begin and end in it."""
        return self._render(self._formed(messages), tools)

    @cached_property
    def answer_end(self) -> str | None:
        """What follows the text of a conversation's last answer; None where the template does not show the text."""
        _, shown, end = (self._probed([_USER, _ANSWER]) or "").rpartition(_PROBE)
        return end if shown else None

    @property
    def end_token(self) -> str | None:
        """The special token that ends an answer; None: there is none."""
        found = self.special.search((self.answer_end or "") + self.opening("user"))
        return None if found is None else found[0]

    def opening(self, role: str) -> str:
        """The special token, with the blanks before it, that opens a turn behind an answer; empty: there is none."""
        if role not in self._openings:
            answered = [_USER, _ANSWER if role == "user" else _CALL]
            before, after = (self._probed(turns) for turns in (answered, [*answered, _of_role(role)]))
            rest = after[len(before) :] if before and after and after.startswith(before) else ""
            blanks = len(rest) - len(rest.lstrip())
            found = self.special.match(rest, blanks)
            named = found is not None and found[0] != self._variables.get("bos_token")
            self._openings[role] = rest[: found.end()] if found is not None and named else ""
        return self._openings[role]

    def without_place(self, message: Message) -> list[str]:
        """What of a message the template never shows where it belongs: keys that it does not read, its role."""
        missing = [
            key
            for key in message
            if key not in ("role", "content")
            and (not self.reads(key) or (key in REASONING_KEYS and self._closes_thinking))
        ]
        return missing + ([f"role {message['role']}"] if self._role(message["role"]) != message["role"] else [])

    def reads(self, key: str) -> bool:
        """Whether the template's code has a name; transformers gives reasoning under all of its names."""
        return any(name in self._words for name in (REASONING_KEYS if key in REASONING_KEYS else (key,)))

    @cached_property
    def _closes_thinking(self) -> bool:
        """Whether the prompt of an answer has the end of its thoughts already."""
        return self.render([_USER], add_generation_prompt=True).rstrip().endswith("</think>")

    def _formed(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the forms and roles that the template shows."""
        formed: list[Message] = []
        moved = False
        for message in messages:
            role = self._role(message["role"])
            moved, before = role == "user" != message["role"], moved
            if (moved or before) and role == "user" and formed and formed[-1]["role"] == "user":
                joined = f"{formed[-1]['content']}\n\n{message['content']}"
                formed[-1], moved = {**formed[-1], "content": joined}, True
            else:
                formed.append({**message, "role": role})
        return [self._forms.apply(message) for message in formed]

    def _role(self, role: str) -> str:
        """The nearest role that the template shows."""
        if role not in self._roles:
            self._roles[role] = role
            if role in _NEAREST:
                shown = [name for name in _NEAREST[role] if self._shows(name)]
                self._roles[role] = (shown or ["user"])[0]
        return self._roles[role]

    def _shows(self, role: str) -> bool:
        """Whether the text of a role's turn is shown, and answers may follow it."""
        turns = [_of_role(role), _USER] if role in ("system", "developer") else [_USER, _CALL, _of_role(role)]
        text = self._attempted([self._forms.apply(turn) for turn in (*turns, _ANSWER)])
        return text is not None and "q7toldq7" in text

    @cached_property
    def _forms(self) -> Forms:
        forms, shown = Forms(), None
        for parts in (False, True):
            text = self._attempted([Forms(parts).apply(turn) for turn in (_USER, _ANSWER)])
            if text and _PROBE in text:
                forms, shown = Forms(parts), text
                break
        nones = 0 if shown is None else shown.count("None")
        for as_text in (False, True):
            for empty in (MISSING, "", None):
                calling = Forms(forms.parts, False, as_text, empty)
                text = self._attempted([calling.apply(turn) for turn in (_USER, _CALL)])
                if text and "q7nameq7" in text and _PROBE in text and '\\"' not in text and text.count("None") <= nones:
                    return calling
        return forms

    def _probed(self, messages: Sequence[Message]) -> str | None:
        return self._attempted(self._formed(messages))

    def _attempted(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages)[0]
        except UserError:
            return None

    def _render(
        self, messages: Sequence[Message], tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)], tools=tools, chat_template=self._source,
                add_generation_prompt=add_generation_prompt, return_assistant_tokens_mask=self.marks_generation,
                **self._variables,
            )  # fmt: skip
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template does not compile (line {error.lineno}: {error.message}): fix it beside the "
                "tokenizer, or give data.chat_template"
            ) from error
        except Exception as error:  # noqa: BLE001 - templates raise jinja's errors and whatever they like
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"the chat template refuses the roles {[m['role'] for m in messages]} ({reason}): reorder the turns"
            ) from error
        return texts[0], spans[0] if spans else []


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """A conversation as text, special tokens spelt out; BOS only where the template writes it.

    Args:
        messages: the turns.
        tokenizer: whose template renders them.
        tools: JSON schemas of the functions that the assistant may call.
        add_generation_prompt: whether the text ends where the assistant speaks next.

    Raises:
        UserError: when the template does not compile, or refuses the messages.
    """
    if not messages and not add_generation_prompt:
        return ""
    template = ChatTemplate.of(tokenizer, tools)
    if template is not None:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    parts = []
    for message in messages:
        end = tokenizer.eos_token if message["role"] == "assistant" else ""
        parts.append(f"{_PLAIN_NAMES[message['role']]}: {text_with_calls(message)}{end}\n\n")
    return "".join(parts) + (f"{_PLAIN_NAMES['assistant']}:" if add_generation_prompt else "")


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of rendered text; without a chat template, behind the BOS that the tokenizer adds by itself."""
    return [*leading_bos(text, tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]


def leading_bos(text: str, tokenizer: PreTrainedTokenizerBase, *, plain: bool | None = None) -> list[int]:
    """[BOS] where a text needs it before its own tokens, else [].

    A chat template writes BOS itself where its model has one. Plain text gets what the tokenizer adds by itself, once.

    Args:
        text: to tokenise without special tokens.
        tokenizer: of the model.
        plain: whether no template has rendered the text; none: as the tokenizer has a template.
    """
    plain = tokenizer.chat_template is None if plain is None else plain
    bos = tokenizer.bos_token_id
    if not plain or bos is None or text.startswith(str(tokenizer.bos_token)):
        return []
    return [int(bos)] if tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [bos] else []


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Every token that decoding may skip as special, named by the tokenizer or not."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted({*added, *tokenizer.all_special_tokens}))


def without_place(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Tools | None) -> list[str]:
    """What of a row the template never shows where it belongs, an entry a message: keys, roles, the row's tools."""
    template = ChatTemplate.of(tokenizer, tools)
    if template is None:
        missing = [key for message in messages for key in message if key not in ("role", "content")]
    else:
        missing = [name for message in messages for name in template.without_place(message)]
    return missing + (["tools"] if tools and (template is None or not template.reads("tools")) else [])


def _of_role(role: str) -> Message:
    """A probe of a turn."""
    answering = {"name": "q7nameq7", "tool_call_id": _CALL_ID} if role not in ("user", "system", "developer") else {}
    return {"role": role, "content": "q7toldq7", **answering}
