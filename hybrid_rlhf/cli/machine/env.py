"""`hybrid-rlhf env`: versions, devices and optional packages, and what is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid_rlhf import __version__
from hybrid_rlhf.configs.commands.machine import EnvConfig
from hybrid_rlhf.runtime.command_line import parse_config, user_errors
from hybrid_rlhf.runtime.output import print_result

if TYPE_CHECKING:
    from hybrid_rlhf.runtime.installation import Fault, Installation


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Print what is installed; exit code 1 if something is wrong."""
    with user_errors():
        parse_config(EnvConfig, argv, prog=prog)
        try:
            from hybrid_rlhf.generation.ops.cpu_kernels import available
            from hybrid_rlhf.runtime.installation import inspect_installation

            found, compiled = inspect_installation(), available()
        except ImportError as error:  # a package that is missing, or installed and broken
            problem = f"{error.name or 'a package'} cannot be imported ({error})"
            fix = f"pip install --force-reinstall {error.name}" if error.name else "reinstall the package"
            print_result({"faults": [{"problem": problem, "fix": fix}]}, f"problem: {problem}: {fix}")
            sys.exit(1)
        print_result(
            {"version": __version__, **vars(found), "compiled_cpu_kernels": compiled},
            "\n".join(_lines(found, compiled)),
        )
        if found.faults:
            sys.exit(1)


def _lines(found: Installation, compiled: bool) -> list[str]:
    lines = [f"{'hybrid_rlhf':24} {__version__}"]
    lines += [f"{name:24} {version}" for name, version in found.versions.items()]
    for device in found.devices:
        lines.append(
            f"{'GPU':24} {device['name']}, {device['memory_gib']:.1f} GiB, compute capability {device['capability']}"
        )
    if not found.devices:
        lines.append(f"{'GPU':24} none")
    lines.append(f"{'runs compute on':24} {found.device.removeprefix('device: ')}")
    host = found.processor
    lines.append(f"{'CPU':24} {host['machine']}, {host['instruction_set']}, {host['cores']} cores")
    lines.append(f"{'host memory':24} {host['memory_gib']:.1f} GiB, {host['free_memory_gib']:.1f} free")
    kernels = "yes" if compiled else "no: generation on a CPU uses torch's operations; install g++ for faster ones"
    lines.append(f"{'compiled CPU kernels':24} {kernels}")
    lines.append("")
    for package in (package for package in found.packages if package.extra is None):
        lines.append(f"{package.name:24} {package.installed or 'missing'}  (required: {package.required or 'any'})")
    lines.append("")
    for extra, missing in found.extras.items():
        state = f"lacks {', '.join(missing)}: pip install 'hybrid_rlhf[{extra}]'" if missing else "installed"
        lines.append(f"{'extra ' + extra:24} {state}")
    return [*lines, "", *(_fault_line(fault) for fault in found.faults)] if found.faults else lines


def _fault_line(fault: Fault) -> str:
    return f"problem: {fault.problem}: {fault.fix}"


if __name__ == "__main__":
    main()
