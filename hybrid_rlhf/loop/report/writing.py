"""Writes report.html and report.json when a run ends.

The page is one file that loads nothing and has no script; its content security policy forbids both. The template
escapes every text of a run.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from hybrid_rlhf.loop.report.charts import chart_groups
from hybrid_rlhf.loop.report.content import collect
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.names import HTML_FILE
from hybrid_rlhf.runtime.observability.alerts import Ending
from hybrid_rlhf.runtime.observability.formatting import format_duration, format_value
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import Run

JSON_FILE = "report.json"


def write_report(run: Run, ending: Ending) -> None:
    """Write both files to the run folder; nothing if the run has not reached its loop.

    Raises:
        OSError: when they cannot be written.
    """
    if not run.in_loop:
        return
    content = collect(run, ending)
    write_whole(run.folder / JSON_FILE, json.dumps(content, indent=1) + "\n")
    page = render("page.html.j2", report=content, charts=chart_groups(content["curves"]))
    write_whole(run.folder / HTML_FILE, page.encode(errors="backslashreplace"))  # a lone surrogate cannot be encoded
    logger.info("report: %s", run.folder / HTML_FILE)


def render(template: str, **values: Any) -> str:
    """A page from a template of this folder; values are escaped."""
    return compiled(template).render(**values)


@functools.cache
def compiled(template: str) -> Template:
    """A template of this folder."""
    folder = files(__package__)
    style = Markup(folder.joinpath("style.css").read_text(encoding="utf-8"))  # our own file  # nosec B704
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {
        "number": format_value,
        "duration": format_duration,
        "first_upper": lambda text: text[:1].upper() + text[1:],
    }
    return pages.from_string(folder.joinpath(template).read_text(encoding="utf-8"), {"style": style})
