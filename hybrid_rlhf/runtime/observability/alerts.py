"""Messages to a webhook when a run ends, fails or stalls, or when a rule of its advice applies.

A message is a JSON object whose `text` Slack shows and whose `content` Discord shows; both ignore the other keys, which
are for programs. It contains no settings, no data and no credentials. A thread sends the messages, so that a slow or
dead server does not delay the run; the log has a line about it.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from typing import Any, Self

from hybrid_rlhf.configs.credentials import redacted
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.runtime.background import BackgroundQueue
from hybrid_rlhf.runtime.observability.logs import logger, shortened
from hybrid_rlhf.runtime.observability.sinks.sink import EndState
from hybrid_rlhf.runtime.urls import expanded_url, shown_url

REQUEST_SECONDS = 5.0
"""Time limit of a request, and of the wait for the last message at the end of the run."""
_LONGEST_TEXT = 1000
"""Number of characters; Discord's limit is 2000."""
logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs complete URLs


@dataclass(frozen=True)
class Ending:
    """State and reason of the end of a run."""

    end_state: EndState
    reason: str = ""
    place: str = ""
    """The innermost line of code of an error that is not a user's mistake."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The ending that an exception means; the exception of a signal stops the run."""
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            return cls("stopped", "by a signal, after a checkpoint" if isinstance(error, SystemExit) else "by Ctrl-C")
        if isinstance(error, UserError):
            return cls("failed", str(error))
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
        return cls("failed", f"{type(error).__name__}: {error}", place)

    @property
    def text(self) -> str:
        """The reason in one line, without credentials."""
        return redacted(shortened(self.reason, _LONGEST_TEXT))


class Alerts:
    """Sends messages to a webhook."""

    def __init__(self, url: str, *, run: str) -> None:
        """Expand the environment variables in the URL.

        Args:
            url: URL with its placeholders.
            run: name of the run, part of every message.

        Raises:
            UserError: when a variable is not set.
        """
        import httpx2

        self._url = expanded_url(url, key="logging.webhook")
        self._shown = shown_url(url)
        self._run = run
        self._client = httpx2.Client(timeout=REQUEST_SECONDS)
        self._queue: BackgroundQueue[dict[str, Any]] = BackgroundQueue(
            self._post,
            name="alerts",
            on_error=lambda error: logger.warning(
                "no more messages are sent to the webhook (%s)", type(error).__name__
            ),
        )

    def send(self, event: str, text: str, *, step: int) -> None:
        """Add a message to the queue.

        Args:
            event: `finished`, `stopped`, `failed`, `stalled`, or `advice`.
            text: description of the event.
            step: the last logged step.
        """
        line = f"{self._run}: {event} after step {step}" + (f": {text}" if text else "")
        line = redacted(shortened(line, _LONGEST_TEXT))
        self._queue.put({"text": line, "content": line, "event": event, "run": self._run, "step": step})

    def close(self) -> None:
        """Wait for the messages, for a limited time."""
        if left := self._queue.close(REQUEST_SECONDS):
            logger.warning("%s does not answer: %d messages are not sent", self._shown, left)

    def _post(self, message: dict[str, Any]) -> None:
        import httpx2

        try:
            response = self._client.post(self._url, json=message)
        except httpx2.HTTPError as error:
            logger.warning("a message could not be sent to %s (%s)", self._shown, type(error).__name__)
            return
        if not response.is_success:
            logger.warning("a message could not be sent to %s (status %d)", self._shown, response.status_code)
