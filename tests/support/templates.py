"""Minimal chat templates that behave as those of model families: their roles, markers, and what they drop.

Each is written anew and does only what its family's template does to a conversation. `learned` says what carries loss
in each kind of row, a list of texts a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from tests.support.tiny import byte_tokenizer

GENERATE = "{% if add_generation_prompt %}{{ PROMPT }}{% endif %}"
CALL = "{% for c in m.tool_calls or [] %}{{ '<call>' + (c.function | tojson) + '</call>' }}{% endfor %}"
JSON_CALL = '{"name": "look", "arguments": {"at": "sky"}}'
THINK = "{% set t = m.reasoning_content or '' %}"
ANSWERED = "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"  # noqa: E501


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and what is learned."""

    template: str | dict[str, str]
    special: tuple[str, ...]
    single: list[str]
    multi: list[str]
    reasoning: list[str]
    tool: list[str]
    end: str | None = None
    """The token that ends a turn; None: the template has none."""


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """One token a byte, and the family's special ones."""
    special = ["<pad>", "<s>", "</s>", *family.special]
    tokenizer = byte_tokenizer(special, family.template, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    return tokenizer


def _prompt(text: str) -> str:
    return GENERATE.replace("PROMPT", repr(text))


def _turns(body: str, prompt: str, before: str = "") -> str:
    return f"{before}{{% for m in messages %}}{body}{{% endfor %}}{_prompt(prompt)}"


IM = ("<|im_start|>", "<|im_end|>")
HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"
TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
CONTENT = "{{ m.content or '' }}"


def _qwen3(prompt: str) -> str:
    """Reasoning behind the last user's turn only, an empty block where that has none."""
    body = (
        f"{HEAD}{THINK}{{% if m.role == 'assistant' and loop.index0 > ns.last %}}"
        "{{ '<think>\n' + t + '\n</think>\n\n' }}{% endif %}" + CONTENT + CALL + "{{ '<|im_end|>\n' }}"
    )
    return TOOLS + _turns(body, prompt, ANSWERED)


_THOUGHTLESS = "<think>\n\n</think>\n\n"
_LOOK = f"<call>{JSON_CALL}</call>"


def _plain(
    template: str | dict[str, str], special: tuple[str, ...], end: str, call: str = JSON_CALL, before: str = ""
) -> Family:
    """A family that shows no reasoning and whose answers, each between `before` and `end`, are one text."""
    one, two, called, seen = (f"{before}{text}{end}" for text in ("one", "two", call, "seen"))
    return Family(template, special, [one], [one + two], [one + two], [called + seen], end)


FAMILIES: dict[str, Family] = {
    "chatml": _plain(
        TOOLS + _turns(HEAD + CONTENT + CALL + "{{ '<|im_end|>\n' }}", "<|im_start|>assistant\n"),
        IM,
        "<|im_end|>",
        _LOOK,
    ),
    "qwen2.5, a system prompt of its own": _plain(
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nhelp<|im_end|>\n' }}{% endif %}"
        + TOOLS
        + _turns(HEAD + CONTENT + CALL + "{{ '<|im_end|>\n' }}", "<|im_start|>assistant\n"),
        IM,
        "<|im_end|>",
        _LOOK,
    ),
    "qwen3": Family(
        _qwen3("<|im_start|>assistant\n"),
        IM,
        [f"{_THOUGHTLESS}one<|im_end|>"],
        [f"{_THOUGHTLESS}one<|im_end|>", f"{_THOUGHTLESS}two<|im_end|>"],
        ["<think>\nbecause\n</think>\n\none<|im_end|>", "<think>\nhence\n</think>\n\ntwo<|im_end|>"],
        [f"{_THOUGHTLESS}{_LOOK}<|im_end|>{_THOUGHTLESS}seen<|im_end|>"],
        end="<|im_end|>",
    ),
    "qwen3 without thinking": Family(
        _qwen3(f"<|im_start|>assistant\n{_THOUGHTLESS}"),
        IM,
        ["one<|im_end|>"],
        ["one<|im_end|>", "two<|im_end|>"],
        ["one<|im_end|>", "two<|im_end|>"],
        [f"{_LOOK}<|im_end|>seen<|im_end|>"],
        end="<|im_end|>",
    ),
    "qwen3.5, a prompt that opens a block of thoughts": Family(
        _qwen3("<|im_start|>assistant\n<think>\n"),
        IM,
        ["\n</think>\n\none<|im_end|>"],
        ["\n</think>\n\none<|im_end|>", "\n</think>\n\ntwo<|im_end|>"],
        ["because\n</think>\n\none<|im_end|>", "hence\n</think>\n\ntwo<|im_end|>"],
        [f"\n</think>\n\n{_LOOK}<|im_end|>\n</think>\n\nseen<|im_end|>"],
        end="<|im_end|>",
    ),
    "deepseek, thoughts dropped and prompted for, arguments as text": Family(
        "{{ bos_token }}"
        + _turns(
            "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
            "{% elif m.role == 'tool' %}{{ '<|result|>' + m.content }}{% else %}{{ '<|Assistant|>' }}"
            "{% if m.tool_calls %}{{ m.content + '<|call|>' + m.tool_calls[0].function.name + "
            "m.tool_calls[0].function.arguments + '<|called|>' }}{% else %}{{ m.content.split('</think>')[-1] }}"
            "{% endif %}{{ eos_token }}{% endif %}",
            "<|Assistant|><think>\n",
        ),
        ("<|User|>", "<|Assistant|>", "<|call|>", "<|called|>", "<|result|>"),
        ["\n</think>\n\none</s>"],
        ["\n</think>\n\none</s>", "\n</think>\n\ntwo</s>"],
        ["because\n</think>\n\none</s>", "hence\n</think>\n\ntwo</s>"],
        ['\n</think>\n\n<|call|>look{"at": "sky"}<|called|></s>', "\n</think>\n\nseen</s>"],
        end="</s>",
    ),
    "nemotron, empty thoughts shown in one word": Family(
        _turns(
            HEAD + "{% if m.role == 'assistant' %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' if "
            "m.reasoning_content and loop.last else '<think></think>' }}{% endif %}"
            + CONTENT
            + CALL
            + "{{ '<|im_end|>\n' }}",
            "<|im_start|>assistant\n<think>\n",
        ),
        IM,
        ["\n</think>\n\none<|im_end|>"],
        ["\n</think>\n\none<|im_end|>", "\n</think>\n\ntwo<|im_end|>"],
        ["because\n</think>\none<|im_end|>", "hence\n</think>\ntwo<|im_end|>"],
        [f"\n</think>\n\n{_LOOK}<|im_end|>", "\n</think>\n\nseen<|im_end|>"],
        end="<|im_end|>",
    ),
    "gpt-oss, channels, another end in history": Family(
        _turns(
            "{{ '<|start|>' + (m.role if m.role != 'tool' else 'functions.look to=assistant') }}"
            "{% if m.role == 'assistant' %}{% if m.tool_calls %}{{ ' to=functions.' + m.tool_calls[0].function.name + "
            "'<|channel|>commentary<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
            "{% else %}{% if m.thinking and loop.last %}{{ '<|channel|>analysis<|message|>' + m.thinking + "
            "'<|end|><|start|>assistant' }}{% endif %}{{ '<|channel|>final<|message|>' + m.content + "
            "('<|return|>' if loop.last else '<|end|>') }}{% endif %}"
            "{% else %}{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}",
            "<|start|>assistant",
        ),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        ["<|channel|>final<|message|>one<|return|>"],
        ["<|channel|>final<|message|>one<|return|>", "<|channel|>final<|message|>two<|return|>"],
        [
            "<|channel|>analysis<|message|>because<|end|><|start|>assistant<|channel|>final<|message|>one<|return|>",
            "<|channel|>analysis<|message|>hence<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>",
        ],
        [
            ' to=functions.look<|channel|>commentary<|message|>{"at": "sky"}<|call|>'
            "<|channel|>final<|message|>seen<|return|>"
        ],
        end="<|return|>",
    ),
    "phi-3, eos behind the whole": _plain(
        _turns("{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", "<|assistant|>\n")
        + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
        "<|end|>",
    ),
    "llama 3": _plain(
        "{{ bos_token }}"
        + _turns(
            "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "llama 3.1, calls as parameters, results of ipython": _plain(
        "{{ bos_token }}"
        + _turns(
            "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
            '{% if m.tool_calls %}{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
            "{{ (m.tool_calls[0].function.arguments | tojson) + '}' }}{% else %}{{ m.content | trim }}{% endif %}"
            "{{ '<|eot_id|>' }}",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        '{"name": "look", "parameters": {"at": "sky"}}',
    ),
    "llama 2, the system's text within the user's": Family(
        _turns(
            "{% if m.role == 'system' %}{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + ('<<SYS>>\n' + "
            "messages[0].content + '\n<</SYS>>\n\n' if loop.index0 == 1 and messages[0].role == 'system' else '') + "
            "m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
            "{% else %}{{ raise_exception('no tools') }}{% endif %}",
            "",
        ),
        (),
        [" one </s>"],
        [" one </s> two </s>"],
        [" one </s> two </s>"],
        [f" {JSON_CALL} </s> seen </s>"],
        end="</s>",
    ),
    "mistral, tools before the last user, ids of nine characters": Family(
        "{{ bos_token }}"
        + _turns(
            "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}{{ '[TOOLS]' + (tools | tojson) }}"
            "{% endif %}{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'system' %}{{ m.content }}"
            "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
            "{{ '[RESULT]' + m.content }}{% elif m.tool_calls %}{{ '[CALLS]' + (m.tool_calls[0].function | tojson) + "
            "eos_token }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}",
            "",
            ANSWERED,
        ),
        ("[INST]", "[/INST]", "[TOOLS]", "[CALLS]", "[RESULT]"),
        [" one</s>"],
        [" one</s> two</s>"],
        [" one</s> two</s>"],
        [f"[CALLS]{JSON_CALL}</s> seen</s>"],
        end="</s>",
    ),
    "gemma 2, no system, turns that alternate": _plain(
        "{{ bos_token }}{% if messages and messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + _turns(
            "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
            "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + "
            "'<end_of_turn>\n' }}",
            "<start_of_turn>model\n",
        ),
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "gemma 3, the system's text before the user's, contents in parts": _plain(
        "{{ bos_token }}{% set first = '' %}{% set turns = messages %}"
        "{% if messages and messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
        "{% set turns = messages[1:] %}{% endif %}{% for m in turns %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '')"
        " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}" + _prompt("<start_of_turn>model\n"),
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "glm 4, no token behind an answer": Family(
        _turns(
            "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ '\n' }}" + CONTENT + CALL,
            "<|assistant|>",
        ),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ["\none<|user|>"],
        ["\none<|user|>\ntwo<|user|>"],
        ["\none<|user|>\ntwo<|user|>"],
        [f"\n{_LOOK}<|observation|>\nseen<|user|>"],
        end="<|user|>",
    ),
    "glm 4.5, the same with thoughts and calls in tags": Family(
        _turns(
            "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
            "{{ '\n<think>' + (m.reasoning_content if m.reasoning_content and loop.index0 > ns.last else '') + "
            "'</think>' }}{% endif %}{{ '\n' }}"
            + CONTENT
            + "{% for c in m.tool_calls or [] %}{{ '<tool>' + c.function.name }}{% for k, v in "
            "c.function.arguments.items() %}{{ '<key>' + k + '</key><value>' + v + '</value>' }}{% endfor %}"
            "{{ '</tool>' }}{% endfor %}",
            "<|assistant|>",
            ANSWERED,
        ),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ["\n<think></think>\none<|user|>"],
        ["\n<think></think>\none<|user|>\n<think></think>\ntwo<|user|>"],
        ["\n<think>because</think>\none<|user|>", "\n<think>hence</think>\ntwo<|user|>"],
        [
            "\n<think></think>\n<tool>look<key>at</key><value>sky</value></tool><|observation|>"
            "\n<think></think>\nseen<|user|>"
        ],
        end="<|user|>",
    ),
    "command-r": _plain(
        "{{ bos_token }}"
        + _turns(
            "{{ '<|TURN|><|' + (m.role | upper) + '|>' + m.content.strip() + '<|END_OF_TURN|>' }}",
            "<|TURN|><|ASSISTANT|>",
        ),
        ("<|TURN|>", "<|END_OF_TURN|>", "<|USER|>", "<|SYSTEM|>", "<|ASSISTANT|>", "<|TOOL|>"),
        "<|END_OF_TURN|>",
    ),
    "cohere 2, two tokens behind an answer": _plain(
        _turns(
            "{{ '<|TURN|>' + m.role + '<|START|>' + m.content + ('<|END|>' if m.role == 'assistant' else '') + "
            "'<|END_OF_TURN|>' }}",
            "<|TURN|>assistant<|START|>",
        ),
        ("<|TURN|>", "<|START|>", "<|END|>", "<|END_OF_TURN|>"),
        "<|END|>",
    ),
    "smollm3, marks of its own": _plain(
        _turns(
            HEAD + "{% if m.role == 'assistant' %}{% generation %}" + CONTENT + CALL + "{{ '<|im_end|>' }}"
            "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}",
            "<|im_start|>assistant\n",
        ),
        IM,
        "<|im_end|>",
        _LOOK,
    ),
    "lfm 2.5, marks that hold the line break": Family(
        "{{ bos_token }}"
        + _turns(
            HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ '<think>' + m.thinking + '</think>' if m.thinking "
            "and loop.last else '' }}" + CONTENT + CALL + "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}"
            "{{ m.content + '<|im_end|>\n' }}{% endif %}",
            "<|im_start|>assistant\n",
        ),
        IM,
        ["one<|im_end|>\n"],
        ["one<|im_end|>\ntwo<|im_end|>\n"],
        ["<think>because</think>one<|im_end|>\n", "<think>hence</think>two<|im_end|>\n"],
        [f"{_LOOK}<|im_end|>\nseen<|im_end|>\n"],
        end="<|im_end|>",
    ),
    "lfm 2, calls passed over": _plain(
        _turns(HEAD + CONTENT + "{{ '<|im_end|>\n' }}", "<|im_start|>assistant\n", TOOLS),
        IM,
        "<|im_end|>",
    ),
    "granite": _plain(
        _turns(
            "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}" + CONTENT + CALL + "{{ '<|end_of_text|>\n' }}",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        _LOOK,
    ),
    "olmo, eos behind the last answer only": Family(
        "{{ bos_token }}"
        + _turns(
            "{{ '<|' + m.role + '|>\n' + m.content }}{{ eos_token if m.role == 'assistant' and loop.last else '\n' }}",
            "<|assistant|>\n",
        ),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
        ["one</s>"],
        ["one</s>", "two</s>"],
        ["one</s>", "two</s>"],
        [f"{JSON_CALL}</s>", "seen</s>"],
        end="</s>",
    ),
    "zephyr": _plain(
        _turns("{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}", "<|assistant|>\n"),
        (),
        "</s>",
    ),
    "vicuna, names in plain text": _plain(
        _turns(
            "{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}{% elif m.role == 'assistant' %}"
            "{{ 'ASSISTANT: ' + m.content + eos_token }}{% elif loop.first %}{{ m.content + ' ' }}{% endif %}",
            "ASSISTANT:",
        ),
        (),
        "</s>",
        before=" ",
    ),
    "falcon, nothing behind an answer": Family(
        _turns("{{ m.role | capitalize + ': ' + m.content + '\n' }}", "Assistant:"),
        (),
        [" one\n"],
        [" one\n two\n"],
        [" one\n two\n"],
        [f" {JSON_CALL}\n seen\n"],
    ),
    "llava, contents in parts": _plain(
        "{{ bos_token }}"
        + _turns(
            "{{ m.role | upper + ':' }}{% for p in m.content %}{{ ' ' + p.text }}{% endfor %}"
            "{{ '<end_of_utterance>\n' }}",
            "ASSISTANT:",
        ),
        ("<end_of_utterance>",),
        "<end_of_utterance>",
        before=" ",
    ),
    "hermes, one template for tools and one for none": _plain(
        {
            "default": _turns(HEAD + "{{ m.content + '<|im_end|>\n' }}", "<|im_start|>assistant\n"),
            "tool_use": TOOLS + _turns(HEAD + CONTENT + CALL + "{{ '<|im_end|>\n' }}", "<|im_start|>assistant\n"),
        },
        IM,
        "<|im_end|>",
        _LOOK,
    ),
    "kimi, an end in the middle": _plain(
        _turns(
            "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}" + CONTENT + CALL + "{{ '<|im_end|>' }}",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_tool|>", "<|im_middle|>", "<|im_end|>"),
        "<|im_end|>",
        _LOOK,
    ),
}
