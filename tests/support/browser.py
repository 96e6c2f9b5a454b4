"""Debian's Chromium, driven by Playwright: pages that fail on any error of the console, and a check by axe-core."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[1] / "board" / "browser" / "axe.min.js"
DESKTOP, PHONE = {"width": 1360, "height": 860}, {"width": 375, "height": 760}
_WORDS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def require_browser() -> None:
    """Skip the test where there is no browser; on CI, where there must be one, fail."""
    with contextlib.suppress(ImportError):
        import playwright  # noqa: F401

        if CHROMIUM is not None:
            return
    reason = "needs the package playwright (extra test) and chromium: apt-get install chromium"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def browser_context() -> Iterator[Any]:
    """A browser with an empty profile, headless."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=_WORDS.split(), viewport=DESKTOP
        )
        context.set_default_timeout(120_000)
        yield context
        context.close()


@contextlib.contextmanager
def checked_page(context: Any) -> Iterator[Any]:
    """A new page whose console must stay free of errors, besides those of a board that does not answer."""
    page, errors = context.new_page(), list[str]()
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert not [error for error in errors if "ERR_CONNECTION_REFUSED" not in error], errors


def show(page: Any, url: str, address: str) -> None:
    """Open a view and wait until it has loaded its data."""
    page.goto("about:blank")
    page.goto(f"{url}/#/{address}")
    wait_in_page(page, "document.querySelector('main h1') && !document.querySelector('main .loading')")


def press(page: Any, name: str) -> None:
    """Click the button of this name."""
    page.get_by_role("button", name=name, exact=True).click()


def wait_for_text(page: Any, text: Any) -> None:
    """Wait until a text, or what matches a pattern, is shown."""
    page.get_by_text(text).wait_for()


def wait_in_page(page: Any, expression: str, *, seconds: float = 120) -> None:
    """Wait until an expression is true; Playwright's own way to wait needs eval, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not true within {seconds} s: {expression}"
        page.wait_for_timeout(50)


def axe_findings(page: Any) -> list[str]:
    """What axe-core finds against WCAG 2.2 A and AA, serious and critical."""
    page.evaluate(AXE.read_text())  # not an inline script, which the page's policy forbids
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    found = page.evaluate("tags => axe.run(document, {runOnly: {type: 'tag', values: tags}})", tags)
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
