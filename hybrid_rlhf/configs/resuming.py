"""Which settings a run may be resumed with: those that decide where things are and how they run, not what is learned.

The one table of these keys. `train.py` refuses to continue a folder with any other change, a finished run counts as
finished for the settings that it was made with, and a step that resumes from a checkpoint names other changes in a
warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_FREE_KEYS = re.compile(
    r"resume|output_dir|(logging|faults)\..*|data\.cache_dir|train\.(save|keep|micro_batch)_.*"
    r"|((actor|critic)\.)?zero\..*|model\.(gradient_checkpointing|activation_offload)"
    r"|rollout\.(offload_.*|kv_cache_gib|keep_weights|max_decode_rows|tensor_parallel)"
)


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted keys, sorted, whose values differ between two configs of a step and that decide what is learned."""
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return [key for key in changed if not _FREE_KEYS.fullmatch(key)]
