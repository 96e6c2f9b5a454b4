"""Samples in the API's form: rows of a list, a sample with its tokens, histograms, and the prompts of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_rlhf.board.runs.folders import RunFolder
from hybrid_rlhf.board.runs.reading import finite, is_count, number
from hybrid_rlhf.board.runs.tokens import RunTokens
from hybrid_rlhf.board.samples.images import shown_images, thumbnail_of
from hybrid_rlhf.board.samples.index import Rows, SampleIndex, SampleView, search_words
from hybrid_rlhf.board.samples.lines import last_text, preview, prompt_key, prompt_messages
from hybrid_rlhf.board.samples.queries import PromptQuery, SampleQuery, find
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.observability.samples import episode_images

_CATCH_UP_SECONDS = 0.2
"""Time for which a request indexes new lines; the watcher indexes the rest."""


_BINS = 20
_HAS_WORDS = "(?1 IS NULL OR prompt IN (SELECT rowid FROM prompt_words WHERE prompt_words MATCH ?1))"
_PROMPT_COUNT = f"SELECT count(*) FROM prompts WHERE {_HAS_WORDS}"
_PROMPTS = f"""
    SELECT min(row), count(*), group_concat(DISTINCT step), avg(score) FILTER (WHERE abs(score) < 9e999) FROM samples
    WHERE prompt IN (
        SELECT prompt FROM samples WHERE {_HAS_WORDS} GROUP BY prompt ORDER BY count(*) DESC, prompt LIMIT ?2 OFFSET ?3
    ) GROUP BY prompt ORDER BY count(*) DESC, prompt
"""


class UnknownSample(UserError):
    """There is no sample with this step and index, or no prompt with this key."""


class Samples:
    """The samples of one run."""

    def __init__(self, run: RunFolder, tokens: RunTokens) -> None:
        """Take the run and its recorded tokens."""
        self.run = run
        self.index = SampleIndex(run)
        self._tokens = tokens

    def page(self, query: SampleQuery) -> dict[str, Any]:
        """GET /api/runs/RUN/samples."""
        with self.view() as view:
            rows = find(view, query)
            return {
                "total": len(rows),
                "indexed": view.progress,
                "steps": np.unique(view.column("step")).astype(int).tolist(),
                "components": list(view.state.components),
                "rows": self._rows(view, query.page(rows)),
            }

    def sample(self, step: int, position: int) -> dict[str, Any]:
        """GET /api/runs/RUN/samples/STEP/INDEX.

        Raises:
            UnknownSample: if there is no such sample.
        """
        row = self.line(step, position)
        with self.index.view() as view:
            # the scale of the bars of components
            limits = [_limits(view.column(f"component/{name}")) for name in view.state.components]
        return {
            **_shared(row, position),
            "prompt": prompt_messages(row),
            "completion": str(row["completion"]),
            "columns": columns if isinstance(columns := row.get("columns"), dict) else {},
            "advantage": finite(number(row.get("advantage"))),
            "weight_versions": row.get("weight_versions"),
            "tokens": self._tokens.shown(step, position),
            "component_limit": max((abs(value) for pair in limits for value in pair or ()), default=None),
        }

    def distributions(self, step: int | None) -> dict[str, Any]:
        """GET /api/runs/RUN/distributions: the number of samples of a step, by default the newest, in equal ranges.

        The ranges span the whole run, so that steps can be compared.
        """
        with self.view() as view:
            steps = view.column("step")
            shown = int(steps.max()) if step is None and len(steps) else step
            histograms: dict[str, Any] = {"step": shown}
            for name in ("score", "length"):
                values = view.column(name)
                limits = _limits(values)
                values = values[(steps == shown) & np.isfinite(values)]
                counts, edges = np.histogram(values, bins=_BINS, range=limits)
                histograms[name] = limits and {"edges": edges.tolist(), "counts": counts.tolist()}
        return histograms

    def line(self, step: int, position: int) -> dict[str, Any]:
        """The row of samples.jsonl of a sample; the last row if a step was written twice."""
        with self.view() as view:
            rows = view.ask("SELECT row FROM samples WHERE step = ? AND position = ? ORDER BY row", step, position)
            if not rows:
                raise UnknownSample(
                    f"step and index must be of a recorded sample, got {step} and {position}: see samples"
                )
            return view.lines(rows[-1:])[0]

    def thumbnail(self, step: int, position: int, digest: str) -> bytes:
        """GET /api/runs/RUN/samples/STEP/INDEX/images/DIGEST; raises UserError as `thumbnail_of`."""
        return thumbnail_of(episode_images(self.line(step, position)), digest)

    def prompts(self, query: PromptQuery) -> dict[str, Any]:
        """GET /api/runs/RUN/prompts, the most frequent first."""
        rows = []
        with self.view() as view:
            words = search_words(query.text) if query.text else None
            (total,) = view.ask(_PROMPT_COUNT, words)
            values = (words, query.limit, query.offset)
            for first, count, steps, score in view.database.execute(_PROMPTS, values).fetchall():
                (line,) = view.lines([first])
                rows.append(
                    {
                        "prompt_key": prompt_key(line),
                        "preview": preview(last_text(prompt_messages(line))),
                        "samples": count,
                        "steps": sorted(map(int, steps.split(","))),
                        "mean_score": score,
                    }
                )
        return {"total": total, "rows": rows}

    def of_prompt(self, key: str, most: int) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
        """The messages of a prompt (None if the run does not have it), and rows of its samples."""
        with self.view() as view:
            rows = view.rows_of_prompt(key)[:most]
            if not len(rows):
                return None, []
            messages = prompt_messages(view.lines(rows[:1])[0])
            return messages, [{"run": self.run.id, **row} for row in self._rows(view, rows)]

    def view(self) -> AbstractContextManager[SampleView]:
        """Context with the indexed samples, after a short update."""
        self.index.update(_CATCH_UP_SECONDS)
        return self.index.view()

    def _rows(self, view: SampleView, rows: Rows) -> list[dict[str, Any]]:
        shown = []
        for line, position in zip(view.lines(rows), view.column("position")[rows].tolist(), strict=True):
            shown.append(
                {
                    **_shared(line, int(position)),
                    "prompt_preview": preview(last_text(prompt_messages(line))),
                    "completion_preview": preview(str(line["completion"])),
                    "has_tokens": self._tokens.has(line["step"]),
                }
            )
        return shown


def _limits(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """The smallest and the largest finite value."""
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if len(values) else None


def _shared(row: dict[str, Any], position: int) -> dict[str, Any]:
    """The fields that a list and a single sample share; older runs lack some."""
    parts = row.get("components")
    group = row.get("group")
    length = row.get("length")
    stopped = row.get("stopped")
    return {
        "prompt_key": prompt_key(row),
        "images": shown_images(episode_images(row)),
        "step": row["step"],
        "index": position,
        "group": group if is_count(group) else None,
        "score": finite(number(row.get("score"))),
        "kl": finite(number(row.get("kl"))),
        "length": length if is_count(length) else None,
        "components": {str(name): finite(number(value)) for name, value in parts.items()}
        if isinstance(parts, dict)
        else {},
        "stopped": stopped if isinstance(stopped, bool) else None,
    }
