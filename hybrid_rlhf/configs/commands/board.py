"""Settings of `hybrid-rlhf board`."""

from __future__ import annotations

from hybrid_rlhf.configs.credentials import is_own_host
from hybrid_rlhf.configs.sections.rules import Port, Settings, require


class BoardConfig(Settings):
    """Show training runs in a browser: curves, rollouts, preferences, chat, start and stop."""

    folders: list[str] = ["output"]
    """Folders with runs, at any depth; new runs and judgements are written to the first."""
    models: list[str] = []
    """Models and reward models for the chat besides those below the folders: folders or hub names. A client can name
    no other."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs a token, because the board starts
    processes."""
    port: Port = 8765
    """Port to listen on; 0: any free port."""
    token: str | None = None
    """Token that a browser must send, as in http://HOST:PORT/?token=TOKEN; null: none."""
    open: bool = False
    """Open the page in the local browser."""

    def _check(self) -> None:
        require(self.folders, "folders must name a folder with runs, got none: give for example output")
        require(
            self.token is None or len(self.token) >= 8,
            "token must have 8 characters or more, got fewer: give a longer one, or leave it out",
        )
        require(
            self.token is not None or is_own_host(self.host),
            f"a board that other machines reach needs a token, got host {self.host} without one: give --token, or "
            "leave host out",
        )
