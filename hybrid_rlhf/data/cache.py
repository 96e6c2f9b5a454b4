"""Cache of tokenised rows on disk, memory-mapped, written once by one rank.

The key of an entry covers content, tokenizer, chat template and settings. An entry is written to a temporary folder and
renamed, so that a partial one is never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.files.reading import cache_folder
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World, run_once_per_host

_DATE_FUNCTION = "strftime_now"
"""Function of transformers that gives templates the current time; they write the day (Llama 3.2, gpt-oss)."""
_MANY_ROWS = 20_000
"""Number of rows from which writing takes seconds, so that the log announces it."""
_ABANDONED_SECONDS = 24 * 3600
"""Age from which a temporary folder is of a process that was killed: an entry is written within minutes."""
_BATCH_ROWS = 1000
"""Number of rows held as Python lists at a time, 70 bytes per token; finished batches are Arrow tables."""


def cached_rows(
    key: Mapping[str, Any],
    make: Callable[[], Iterator[dict[str, Any]]],
    *,
    cache_dir: str | None,
    world: World,
) -> datasets.Dataset:
    """The rows of a key, created if they are not in the cache.

    Args:
        key: everything the rows depend on, as JSON.
        make: yields the rows; called on one rank, and on one rank of each host that does not share its file system.
        cache_dir: folder of the cache; None: ~/.cache/hybrid_rlhf.
        world: every rank calls.

    Raises:
        UserError: raised by `make`, on every rank.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_folder(cache_dir) / "tokens" / digest
    run_once_per_host(world, lambda: _write(folder, make))
    return datasets.load_from_disk(str(folder))


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The properties of a tokenizer that tokens depend on: rules, special tokens, chat template, and the date if the
    template writes it."""
    rules = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {
        "rules": hashlib.sha256(rules.encode()).hexdigest(),
        "special": special,
        "template": tokenizer.chat_template,
        "date": date.today().isoformat() if _DATE_FUNCTION in str(tokenizer.chat_template) else None,
    }


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of killed processes."""
    oldest = time.time() - _ABANDONED_SECONDS
    for partial in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < oldest:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Context without progress bars of `datasets`, which would stand between the lines of a log."""
    shows_progress = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shows_progress:
            datasets.enable_progress_bars()


@quiet_datasets()
def _write(folder: Path, make: Callable[[], Iterator[dict[str, Any]]]) -> str | None:
    """Create an entry unless it exists; return the text of a user's error, or None."""
    if folder.exists():
        return None
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        made = make()
        batches = iter(lambda: list(islice(made, _BATCH_ROWS)), [])
        rows = datasets.concatenate_datasets([datasets.Dataset.from_list(batch) for batch in batches])
        if len(rows) > _MANY_ROWS:
            logger.info("writing %s tokenised rows to %s", f"{len(rows):,}", folder)
        partial.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(partial.parent)
        rows.save_to_disk(str(partial))
        for file in partial.iterdir():
            file.chmod(0o444)  # runs map these files: truncating one would kill them with SIGBUS
        os.rename(partial, folder)
    except UserError as error:
        return str(error)
    except OSError as error:
        if folder.exists():
            return None  # another run has created it in the meantime
        return (
            f"data.cache_dir must be a writable folder, {folder.parent} is not ({error.strerror or error}): set another"
        )
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return None
