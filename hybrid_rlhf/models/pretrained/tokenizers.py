"""Loads and checks tokenizers: an EOS token is required, a pad token is set, a chat template is optional.

The pad token may equal EOS: lengths come from masks, never from token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.folders import load_config, reading
from hybrid_rlhf.models.pretrained.sources import quiet_transformers
from hybrid_rlhf.runtime.files.reading import read_text

_TOKENIZER_FILES = r"tok|tek|vocab|merges|\.model$|\.gguf$"


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved model, with EOS and pad tokens.

    Args:
        path: path of a resolved model.
        trust_remote_code: true if code of the tokenizer may run.
        chat_template: Jinja file to use in place of the tokenizer's template; None keeps the template.
        chat_template_kwargs: variables of the template; they become its defaults, also in a tokenizer that is saved
            from this one.

    Raises:
        UserError: when there is no tokenizer, when it has no EOS token or has tokens without an embedding in the model,
            or when the file of the template cannot be read.
    """
    alone = Path(path).is_dir() and not (Path(path) / "config.json").is_file()
    config = None if alone else load_config(path, trust_remote_code=trust_remote_code)
    no_files = UserError(
        f"a model folder must have tokenizer files, {path} has none: save its tokenizer there with save_pretrained"
    )
    if Path(path).is_dir() and not any(re.search(_TOKENIZER_FILES, file.name) for file in Path(path).iterdir()):
        raise no_files
    rule = f"transformers cannot load a tokenizer from {path}"
    with quiet_transformers(), reading(rule, "save one beside the model"):
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer("text")  # raises for settings of a wrong type
    if len(tokenizer) <= len(tokenizer.get_added_vocab()) + 1:  # without files transformers may build an empty one
        raise no_files
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"a tokenizer must have an EOS token, {path} has none: set tokenizer.eos_token and save it beside the model"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise UserError(f"a chat template must be text, that of {path} is {tokenizer.chat_template!r}: correct it")
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    if chat_template_kwargs:
        _set_defaults(tokenizer, path, chat_template_kwargs)
    if config is not None:
        _check_size(tokenizer, path, config.get_text_config())
    return tokenizer  # type: ignore[no-any-return]


def _read_template(file: str) -> str:
    """The template in a file, which compiles."""
    rule = "chat_template must name a file with a Jinja template"
    template = read_text(file, rule)
    if not template.strip():
        raise UserError(f"{rule}, {file} is empty: write one, or leave the key out")
    try:
        render_jinja_template(conversations=[], chat_template=template)
    except TemplateSyntaxError as error:
        raise UserError(f"{rule}, {file}:{error.lineno} has an error ({error.message}): fix the line") from error
    return template


def _set_defaults(tokenizer: Any, path: str, values: Mapping[str, Any]) -> None:
    """Prepend default values of a template's variables to it."""
    template = tokenizer.chat_template
    if template is None:
        raise UserError(
            f"chat_template_kwargs need a chat template, {path} has none, got {dict(values)}: set chat_template"
        )
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in values.items()
    )
    defaults += "{{- '' }}"  # keeps a line break after the last block
    if isinstance(template, dict):
        tokenizer.chat_template = {name: defaults + text.removeprefix(defaults) for name, text in template.items()}
    else:
        tokenizer.chat_template = defaults + template.removeprefix(defaults)


def _check_size(tokenizer: Any, path: str, config: Any) -> None:
    """Require an embedding of every token that can occur; a missing one would fail in the middle of a run. Tokens that
    never occur, such as Gemma 3's for images, may have none."""
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int):
        return
    used = {token for token in tokenizer.get_added_vocab() if token in str(tokenizer.chat_template or "")}
    beyond = {tokenizer.convert_ids_to_tokens(i): i for i in range(rows, tokenizer.vocab_size)}
    written = {tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token, *used} - {None}
    beyond |= {token: i for token in written if (i := tokenizer.convert_tokens_to_ids(token)) >= rows}
    if beyond:
        token, i = max(beyond.items(), key=lambda item: item[1])
        raise UserError(
            f"the embedding of {path} has {rows} tokens, its tokenizer has {token!r} with id {i}: "
            "save the tokenizer of this model beside it, or call resize_token_embeddings"
        )
