"""The page of a pipeline: report.html in its output_dir, which links the reports of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rlhf.loop.report.writing import JSON_FILE, render
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.names import HTML_FILE


def write_pipeline_report(output: Path, folders: Mapping[str, Path]) -> Path | None:
    """Write the page.

    Args:
        output: folder of the pipeline.
        folders: folders of its steps, by name, in their order.

    Returns:
        the path of the page; None if no step has a report yet.

    Raises:
        OSError: when it cannot be written.
    """
    steps = [_step(name, folder, output) for name, folder in folders.items() if (folder / JSON_FILE).exists()]
    if not steps:
        return None
    page = render("pipeline.html.j2", name=output.resolve().name, steps=steps)
    write_whole(output / HTML_FILE, page.encode(errors="backslashreplace"))
    return output / HTML_FILE


def _step(name: str, folder: Path, output: Path) -> dict[str, Any]:
    report = json.loads((folder / JSON_FILE).read_text())
    before_after = {key: (points[0][1], points[-1][1]) for key, points in report["curves"].items() if "eval/" in key}
    file = (folder / HTML_FILE).resolve()
    inside = file.is_relative_to(output.resolve())
    link = file.relative_to(output.resolve()).as_posix() if inside else file.as_uri()
    return {"name": name, "link": link, "report": report, "before_after": before_after}
