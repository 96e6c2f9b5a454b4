"""The text of completions as rewards, servers and people read it, and where its reasoning ends.

Special tokens are left out of a text, but not the marks of reasoning that the template writes: Magistral and Ministral
3 have special tokens [THINK] and [/THINK], without which reasoning and answer run together, and gpt-oss those of the
headers of its channels. Rendering takes such a text of gpt-oss apart again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.messages import Tools
from hybrid_rlhf.data.chat.template import CLOSES_THINKING, ChatTemplate, special_tokens

_ANSWERS = r"<\|channel\|>final<\|message\|>| to=user<\|message\|>"
"""Headers of answers: of gpt-oss, of Muse Glimmer."""
_CLOSES = re.compile(f".*(?:{CLOSES_THINKING.pattern}|{_ANSWERS})", re.DOTALL | re.IGNORECASE)


def text_decoder(tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None) -> Callable[[Sequence[int]], str]:
    """A function of token ids that returns their text without special tokens, but with the template's marks of
    reasoning."""
    template = ChatTemplate.of(tokenizer, tools)
    marks = () if template is None else template.channels or template.thinking_marks or ()
    special = special_tokens(tokenizer) if marks else ()
    shown = [token for token in special if any(token in mark for mark in marks)]
    if not shown:
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))
    skipped = {*tokenizer.convert_tokens_to_ids(list(special))} - {*tokenizer.convert_tokens_to_ids(shown)}
    return lambda ids: str(tokenizer.decode([token for token in ids if token not in skipped]))


def answer_of(completion: str) -> str:
    """The text after the reasoning, which may contain drafts of the answer: after the last mark that closes it, in any
    template's form."""
    match = _CLOSES.match(completion)
    return completion if match is None else completion[match.end() :]
