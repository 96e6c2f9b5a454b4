"""Settings of the sandbox in which programs that a model wrote run."""

from __future__ import annotations

from typing import Any

from hybrid_rlhf.configs.sections.rules import Count, Positive, Settings, require


class SandboxConfig(Settings):
    """Where and within which limits a program runs (docs/agents.md)."""

    kind: str = "local"
    """local: a separate process of this machine without network; docker: a container; or a class of your own as
    module:Class or path/to/file.py:Class, for example for a remote pool."""
    strict: bool = False
    """local: refuse to run if the kernel denies one of the protections; false: warn once which are absent."""
    limits_alone: bool = False
    """local: where no isolation works, run programs with the rights of this user, within limits of time, memory and
    output alone; false: refuse to run. Not for root."""
    timeout_seconds: Positive = 10.0
    """Time limit of a program in seconds, also of its processor time."""
    memory_gib: Positive = 1.0
    """Memory of each process of a program, in GiB; docker: of the container."""
    disk_gib: Positive = 0.25
    """Files that a program may write, in GiB, all in its private folder."""
    processes: Count = 16
    """Processes and threads of a program."""
    output_bytes: Count = 2**20
    """First bytes of standard output and last ones of standard error that are kept; the rest is read and discarded."""
    command: tuple[str, ...] = ()
    """Interpreter and its options, to which the program's file is added; empty: Python, locally that of the run."""
    readable: tuple[str, ...] = ()
    """local: folders that programs may read besides those of the system and of Python."""
    image: str | None = None
    """docker: image of the container."""
    client: str = "docker"
    """docker: client program; podman takes the same options."""
    options: dict[str, Any] = {}
    """Keyword arguments of a class of your own, besides config."""

    def _check(self) -> None:
        is_custom = self.kind not in ("local", "docker")
        require(
            not is_custom or all(self.kind.rpartition(":")),
            f"sandbox.kind is local, docker or a class as module:Class, got {self.kind!r}: write one of them",
        )
        require(
            (self.image is not None) == (self.kind == "docker"),
            f"sandbox.image goes with sandbox.kind docker, got {self.image} with {self.kind}: give both or none",
        )
        require(
            not (self.strict and self.limits_alone),
            "sandbox.strict and sandbox.limits_alone contradict each other, got both: leave one out",
        )
        is_local = self.kind == "local"
        for key in ("strict", "limits_alone", "readable", "options"):
            value = getattr(self, key)
            require(
                (is_custom if key == "options" else is_local) or not value,
                f"sandbox.{key} is not read with sandbox.kind {self.kind}, got {value}: leave it out",
            )
