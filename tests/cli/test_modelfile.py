"""Ollama's Modelfile of an exported GGUF file: its template is the chat template's text, in Go's language."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from hybrid_rlhf.cli.saved_models.modelfile import modelfile, read_turns
from tests.support.commands import CommandLine
from tests.support.errors import user_error
from tests.support.messages import assistant, user
from tests.support.tiny import CHATML, byte_tokenizer, tiny_tokenizer

DEFAULT = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
"""As Qwen 2.5: conversations without a system prompt get one."""
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
"""As Gemma: BOS, other names of roles, no system prompt."""
NUMBERED = "{% for m in messages %}{{ loop.index ~ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
TALK = [user("How are you?"), assistant("Well, thanks."), user("Good.")]
SYSTEM = {"role": "system", "content": "Be brief."}


def go_text(template: str, messages: list[dict[str, Any]]) -> str:
    """What Go renders of the constructs that are used: a range with a chain of conditions."""
    start, body, end = re.fullmatch(
        r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    branches = re.split(r"\{\{ (?:else )?if eq \.Role \"(\w+)\" \}\}", body)
    assert branches[0] == ""
    texts = dict(zip(branches[1::2], branches[2::2], strict=True))
    turns = (texts.get(message["role"], "").replace("{{ .Content }}", message["content"]) for message in messages)
    return start + "".join(turns) + end


@pytest.mark.parametrize(("template", "default"), [(CHATML, None), (DEFAULT, "Be kind.")])
def test_a_template_in_go_renders_conversations_as_the_tokenizer_does(template: str, default: str | None) -> None:
    tokenizer = tiny_tokenizer(template)
    turns = read_turns(tokenizer)
    assert turns.system == default
    for messages in (TALK[:1], TALK, [SYSTEM, *TALK]):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = messages if default is None or messages[0] == SYSTEM else [{**SYSTEM, "content": default}, *messages]
        assert go_text(turns.go_template, given) == expected == turns.text(messages)


def test_bos_is_left_to_llama_cpp_where_the_tokenizer_adds_it() -> None:
    tokenizer = byte_tokenizer(["<bos>", "</turn>"], GEMMA, bos_token="<bos>", eos_token="</turn>")
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert expected.startswith("<bos>") and read_turns(tokenizer).text(TALK) == expected
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    assert read_turns(tokenizer).text(TALK) == expected.removeprefix("<bos>")
    text = modelfile(Path("m.gguf"), tokenizer, None)
    assert 'eq .Role "system"' not in text and text.startswith("# The chat template has no system turns")


def test_stop_words_and_parameters_are_the_model_s() -> None:
    """And where it has none, those that change nothing: Ollama's own defaults would."""
    settings = GenerationConfig(temperature=0.6, top_k=20, do_sample=True, eos_token_id=[0, 2])
    lines = modelfile(Path("a/m.gguf"), tiny_tokenizer(), settings).splitlines()
    assert lines[0] == "FROM ./m.gguf"
    assert {line.removeprefix("PARAMETER ") for line in lines if line.startswith("PARAMETER")} == {
        'stop "<|im_end|>"',
        'stop "<|endoftext|>"',
        "temperature 0.6",
        "top_k 20",
        "top_p 1.0",
        "min_p 0.0",
        "repeat_penalty 1.0",
    }


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        (NUMBERED, "writes turns one after another"),
        (None, "needs a chat template, the tokenizer has none"),
        (CHATML.replace("<|im_end|>", "{{"), "without {{"),
    ],
)
def test_a_template_that_go_cannot_render_is_refused(template: str | None, rule: str) -> None:
    with user_error(re.escape(rule)):
        read_turns(tiny_tokenizer(template))


def test_export_writes_it_beside_the_file(model_folder: Path, tmp_path: Path, cli: CommandLine) -> None:
    pytest.importorskip("gguf")
    result = cli(f"export {model_folder} --output {tmp_path}/m.gguf --format gguf --modelfile true --json").result
    text = (tmp_path / "m.Modelfile").read_text()
    assert result["modelfile"] == str(tmp_path / "m.Modelfile") and text.startswith("FROM ./m.gguf\nTEMPLATE")
