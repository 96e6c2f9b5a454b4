"""`hybrid-rlhf env`: versions, devices and optional packages, and their faults."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hybrid_rlhf import __version__
from hybrid_rlhf.configs.commands.machine import EnvConfig
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_result
from hybrid_rlhf.runtime.sandbox.local import LocalSandbox

if TYPE_CHECKING:
    from hybrid_rlhf.runtime.installation import Installation


@command(EnvConfig)
def main(config: EnvConfig) -> None:
    """Print the installation; exit code 1 if it has a fault."""
    try:
        from hybrid_rlhf.generation.ops.cpu_kernels import available
        from hybrid_rlhf.runtime.installation import inspect_installation

        installation = inspect_installation()
        compiled = available()
    except ImportError as error:  # a missing or broken package
        problem = f"{error.name or 'a package'} cannot be imported ({error})"
        fix = f"pip install --force-reinstall {error.name}" if error.name else "reinstall the package"
        print_result({"faults": [{"problem": problem, "fix": fix}]}, f"problem: {problem}: {fix}")
        sys.exit(1)
    sandbox = _sandbox()
    print_result(
        {"version": __version__, **vars(installation), "compiled_cpu_kernels": compiled, "sandbox": sandbox},
        "\n".join(_lines(installation, compiled, sandbox)),
    )
    if installation.faults:
        sys.exit(1)


def _sandbox() -> dict[str, Any]:
    """The isolation that a model's programs have here with default settings, what it lacks, and why it is no better."""
    try:
        sandbox = LocalSandbox(SandboxConfig())
    except UserError as error:
        return {"isolation": None, "absent": [], "failures": [str(error)]}
    return {
        "isolation": sandbox.isolation.name.lower(),
        "absent": list(sandbox.isolation.absent),
        "failures": list(sandbox.failures),
    }


def _lines(installation: Installation, compiled: bool, sandbox: dict[str, Any]) -> list[str]:
    lines = [f"{'hybrid_rlhf':24} {__version__}"]
    lines += [f"{name:24} {version}" for name, version in installation.versions.items()]
    for device in installation.devices:
        lines.append(
            f"{'GPU':24} {device['name']}, {device['memory_gib']:.1f} GiB, compute capability {device['capability']}"
        )
    if not installation.devices:
        lines.append(f"{'GPU':24} none")
    lines.append(f"{'runs compute on':24} {installation.device.removeprefix('device: ')}")
    host = installation.processor
    lines.append(f"{'CPU':24} {host['machine']}, {host['instruction_set']}, {host['cores']} cores")
    lines.append(f"{'host memory':24} {host['memory_gib']:.1f} GiB, {host['free_memory_gib']:.1f} free")
    kernels = "yes" if compiled else "no: generation on a CPU uses torch's operations; install g++ for faster ones"
    lines.append(f"{'compiled CPU kernels':24} {kernels}")
    absent = f", in which {', '.join(sandbox['absent'])}" if sandbox["absent"] else ""
    failures = f" ({'; '.join(sandbox['failures'])})" if sandbox["failures"] else ""
    lines.append(f"{'sandbox of programs':24} {sandbox['isolation'] or 'none'}{absent}{failures}")
    lines.append("")
    for package in (package for package in installation.packages if package.extra is None):
        lines.append(f"{package.name:24} {package.installed or 'missing'}  (required: {package.required or 'any'})")
    lines.append("")
    for extra, missing in installation.extras.items():
        state = f"lacks {', '.join(missing)}: pip install 'hybrid_rlhf[{extra}]'" if missing else "installed"
        lines.append(f"{'extra ' + extra:24} {state}")
    if installation.faults:
        lines += ["", *(f"problem: {fault.problem}: {fault.fix}" for fault in installation.faults)]
    return lines
