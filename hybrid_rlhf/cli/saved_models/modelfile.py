"""Ollama's Modelfile of a GGUF file: its template, stop words and parameters.

Ollama renders conversations with Go's templates, not Jinja's. The text around the messages of each role is read off
conversations that the chat template renders, and compared with what it renders of others: a template that does more
than to write turns one after another is refused. Source: Ollama's documentation (docs/modelfile.md, docs/template.md).
Ollama's own defaults (temperature 0.8, top-k 40, top-p 0.9, a repetition penalty) are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.chat.template import leading_bos, render

_PARAMETERS = {
    "temperature": ("temperature", 1.0),
    "top_p": ("top_p", 1.0),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
    "repeat_penalty": ("repetition_penalty", 1.0),
}
"""Ollama's parameters: the key of a generation config, and the value without effect."""
_TEXTS = {"system": "SystemText", "user": "UserText", "assistant": "AssistantText"}
"""Contents by which the text around them is found."""


@dataclass(frozen=True)
class Turns:
    """A chat template that writes turns one after another."""

    start: str
    """Text before the first turn."""
    around: Mapping[str, tuple[str, str]]
    """Text before and after a message, by role."""
    opening: str
    """Text that begins the answer."""
    system: str | None
    """The system prompt of conversations that have none; None: they have none."""

    def text(self, messages: Sequence[Message]) -> str:
        """A conversation up to the beginning of the answer."""
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        turns = (message["content"].join(self.around[message["role"]]) for message in messages)
        return "".join([self.start, *turns, self.opening])

    @property
    def go_template(self) -> str:
        """The template in Go's language."""
        text = ""
        for place, (role, (before, after)) in enumerate(self.around.items()):
            text += f'{{{{ {"else " if place else ""}if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        return f"{self.start}{{{{ range .Messages }}}}{text}{{{{ end }}}}{{{{ end }}}}{self.opening}"


def modelfile(gguf: Path, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> str:
    """The text of a Modelfile beside a GGUF file.

    Raises:
        UserError: for a chat template that Ollama cannot be given.
    """
    turns = read_turns(tokenizer)
    eos = None if generation is None else generation.eos_token_id
    stops = [str(tokenizer.convert_ids_to_tokens(token)) for token in stop_token_ids(tokenizer, eos)]
    values = {name: getattr(generation, key, None) for name, (key, _) in _PARAMETERS.items()}
    lines = (
        [] if "system" in turns.around else ["# The chat template has no system turns: system prompts are left out."]
    )
    lines += [f"FROM ./{gguf.name}", f'TEMPLATE """{turns.go_template}"""']
    lines += [] if turns.system is None else [f'SYSTEM """{turns.system}"""']
    lines += [f'PARAMETER stop "{text}"' for text in stops]
    lines += [
        f"PARAMETER {name} {default if values[name] is None else values[name]}"
        for name, (_, default) in _PARAMETERS.items()
    ]
    return "\n".join(lines) + "\n"


def read_turns(tokenizer: PreTrainedTokenizerBase) -> Turns:
    """What a chat template writes around messages.

    Raises:
        UserError: when it does not write turns one after another, or its text cannot stand in a Modelfile.
    """
    if tokenizer.chat_template is None:
        raise UserError("modelfile needs a chat template, the tokenizer has none: leave it out")
    user = {"role": "user", "content": _TEXTS["user"]}
    assistant = {"role": "assistant", "content": _TEXTS["assistant"]}
    system = {"role": "system", "content": _TEXTS["system"]}
    # llama.cpp adds BOS itself where the tokenizer does
    bos = str(tokenizer.bos_token) if leading_bos("a", tokenizer, plain=True) else ""

    def rendered(*messages: Message, opens: bool = False) -> str:
        return render(messages, tokenizer, add_generation_prompt=opens).removeprefix(bos)

    one = rendered(user)
    opening = rendered(user, opens=True).removeprefix(one)
    head, after_user = _around(one, user)
    before_assistant, rest = _around(rendered(user, assistant, user).removeprefix(one), assistant)
    after_assistant = rendered(user, assistant).removeprefix(one + before_assistant + assistant["content"])
    before_user = rest.removeprefix(after_assistant).partition(user["content"])[0]
    start = head.removesuffix(before_user)
    around = {"user": (before_user, after_user), "assistant": (before_assistant, after_assistant)}
    default = None
    before_system, rest = _around(rendered(system, user), system)
    turn_of_user = before_user + user["content"] + after_user
    if rest.endswith(turn_of_user):  # else it is a part of the user's turn: Go's template has none
        after_system = rest.removesuffix(turn_of_user)
        if start and start.startswith(before_system) and start.endswith(after_system):
            default = start[len(before_system) : len(start) - len(after_system)]
            start = ""
        around = {"system": (before_system.removeprefix(start), after_system), **around}
    turns = Turns(start, around, opening, default)
    system_turns = [system] if "system" in around else []
    long = [user, assistant, user, assistant, user]
    tried = [[user], [*system_turns, user], long, [*system_turns, *long]]
    whole = "".join([start, opening, default or "", *(text for pair in around.values() for text in pair)])
    if any(turns.text(messages) != rendered(*messages, opens=True) for messages in tried):
        raise UserError(
            "modelfile needs a chat template that writes turns one after another, this one does more: leave it out, "
            "and Ollama reads the template in the GGUF file"
        )
    if "{{" in whole or '"""' in whole:
        raise UserError('modelfile needs a chat template without {{ and """ in its text: leave it out')
    return turns


def _around(text: str, message: Mapping[str, Any]) -> tuple[str, str]:
    """The text before and after the content of a message."""
    before, _, after = text.partition(message["content"])
    return before, after
