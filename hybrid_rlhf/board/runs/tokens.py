"""The recorded tokens of samples, with their texts if the run's tokenizer is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.token_records import TokenRecords
from hybrid_rlhf.serving.text_stream import TextStream


class RunTokens:
    """The token records of one run."""

    def __init__(self, folder: Path, tokenizers: Callable[[], list[Path]]) -> None:
        """Take the run folder, and a function that lists possible tokenizer files, of which the first existing one is
        used."""
        self._records = TokenRecords(folder)
        self._files = tokenizers
        self._tokenizer: Tokenizer | None = None

    def has(self, step: int) -> bool:
        """True if the tokens of a step are recorded."""
        return self._records.has(step)

    def shown(self, step: int, position: int) -> dict[str, Any] | None:
        """The tokens of a sample in the API's form; None if they are not recorded.

        Raises:
            UserError: if the record cannot be read.
        """
        try:
            record = self._records.read(step, position)
        except (FileNotFoundError, IndexError):
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"the token record of step {step} cannot be read ({error}): restore it") from error
        return {
            "prompt_length": record.prompt_length,
            "ids": record.ids,
            "texts": self._texts(record.ids),
            "response": [int(sampled) for sampled in record.response],
            "columns": record.columns,
        }

    def _texts(self, ids: list[int]) -> list[str] | None:
        """The text of each token; of a character in several tokens, the last token has the text and the others have
        none."""
        if self._tokenizer is None:
            file = next((file for file in self._files() if file.is_file()), None)
            if file is None:
                return None
            self._tokenizer = Tokenizer.from_file(str(file))
        tokenizer = self._tokenizer
        stream = TextStream(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False)))
        return [stream.add([token], None) for token in ids[:-1]] + [stream.add(ids[-1:], "length")]
