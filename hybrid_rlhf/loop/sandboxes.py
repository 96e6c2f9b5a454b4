"""The sandbox of a config: of this machine, of Docker, or a class of the user, for example for a remote pool."""

from __future__ import annotations

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.loop.user_code import describe_error, import_named
from hybrid_rlhf.runtime.sandbox.docker import DockerSandbox
from hybrid_rlhf.runtime.sandbox.local import LocalSandbox
from hybrid_rlhf.runtime.sandbox.process import Sandbox


def build_sandbox(config: SandboxConfig) -> Sandbox:
    """The configured sandbox.

    Raises:
        UserError: if it cannot run a program, or is a class that cannot be made.
    """
    if config.kind == "local":
        return LocalSandbox(config)
    if config.kind == "docker":
        return DockerSandbox(config)
    kind = import_named(config.kind, what="sandbox.kind:")
    try:
        sandbox = kind(config, **config.options)
    except Exception as error:  # noqa: BLE001 - the user's own code
        raise UserError(
            f"sandbox.kind: {config.kind} takes the config and sandbox.options {config.options}, it fails "
            f"({describe_error(error)}): fix it"
        ) from error
    if not callable(getattr(sandbox, "run", None)):
        raise UserError(f"a sandbox must have run(program, ...), {config.kind} has none: add it")
    return sandbox  # type: ignore[no-any-return]
