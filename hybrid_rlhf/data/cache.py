"""Tokenised rows on disk, memory-mapped, written once and by one rank.

An entry's key is made of content, tokenizer, chat template and settings; an entry is written beside and renamed, so
that one that was cut off is never read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World, once_a_host

DEFAULT_CACHE = "~/.cache/hybrid_rlhf"
_MANY_ROWS = 20_000
"""More take seconds to write."""
logger = logging.getLogger(LOGGER_NAME)


def cached_rows(
    key: Mapping[str, Any],
    make: Callable[[], Iterator[dict[str, Any]]],
    *,
    cache_dir: str | None,
    world: World,
) -> datasets.Dataset:
    """The rows of a key, made if they are not there yet.

    Args:
        key: JSON of all that the rows depend on.
        make: yields the rows; called on one rank (and on one of each host that does not see what it wrote).
        cache_dir: where entries are kept; none: ~/.cache/hybrid_rlhf.
        world: every rank calls.

    Raises:
        UserError: what `make` raised, on every rank.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    folder = Path(cache_dir or DEFAULT_CACHE).expanduser() / "tokens" / digest
    once_a_host(world, lambda: _write(folder, make))
    return datasets.load_from_disk(str(folder))


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What tokens depend on in a tokenizer: its rules, special tokens and chat template."""
    rules = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {
        "rules": hashlib.sha256(rules.encode()).hexdigest(),
        "special": special,
        "template": tokenizer.chat_template,
    }


def _write(folder: Path, make: Callable[[], Iterator[dict[str, Any]]]) -> str | None:
    """Make an entry unless it is there; the text of the user's mistake if there is one."""
    if folder.exists():
        return None
    beside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    quiet = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = list(make())
        if len(rows) > _MANY_ROWS:
            logger.info("writing %s tokenised rows to %s", f"{len(rows):,}", folder)
        beside.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).save_to_disk(str(beside))
        for file in beside.iterdir():
            file.chmod(0o444)  # runs read them in place: one that is cut short ends them with SIGBUS
        os.rename(beside, folder)
    except UserError as error:
        return str(error)
    except OSError as error:
        if folder.exists():
            return None  # another run was quicker
        return f"tokenised rows cannot be written to {folder.parent} ({error.strerror or error}): set data.cache_dir"
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if quiet:
            datasets.enable_progress_bars()
    return None
