"""Programs in separate processes of this machine, isolated as far as its kernel allows.

A program has a private folder, which is its working folder, home and /tmp. In namespaces it sees no network and no
other process, and of the file system only what it may read: the system's programs and libraries and those of Python.
As root, namespaces are made by unshare(1), and the program runs as a user that nobody else is, because the kernel does
not limit root's processes. Other users have bubblewrap, if it is installed, or unshare with a user namespace. Where a
container or the kernel denies them, a sandbox is refused, unless the config accepts limits of the process alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import math
import os
import platform
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import partial
from operator import itemgetter
from pathlib import Path

import psutil

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.runtime.observability.logs import warn_once
from hybrid_rlhf.runtime.sandbox.container import STAY, Container, start_container
from hybrid_rlhf.runtime.sandbox.process import SandboxResult, run_process

PROGRAM = "program"
"""File of a program in its folder."""
HOME = "/tmp"  # nosec B108: in a file system of its own
"""Folder of a program in a file system of its own."""
GIB = 2**30
OPEN_FILES = 256
_FILES = 16384
"""Files and folders that a program may have."""
_PROBE_SECONDS = 20.0
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LEAST_USERS = 2**16
_MOST_USERS = 2**31
_LAST_USERS = 10
"""Among the last of 2**16 numbers is nobody's."""
_COUNTED_BY_NAMESPACE = (5, 14)
"""Linux counts processes for each user namespace since this version, before for each user on the whole machine."""
_UNCOUNTED = "its processes are not counted"
_FILES_UNCOUNTED = "its files are limited one by one, not in their sum and number"
_BEGIN = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("sh", "-c", 'echo 1000 >/proc/self/oom_score_adj; exec "$@"', "sh"),
)
"""Words before all others: where the host's memory is exhausted, the kernel kills the program and not the run."""
_IN_HOME = ("sh", "-c", f'cd {HOME} && exec "$@"', "sh")
_NS_GET_PARENT = 0xB702
"""ioctl_ns(2): the user namespace around another."""
_SET_DUMPABLE = 4
"""PR_SET_DUMPABLE of linux/prctl.h."""
_FIX = "install bubblewrap, allow user namespaces, set sandbox.kind docker"
_NO_PRIVILEGES = ("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the same program has the same reward
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Nothing of the run's environment, which may contain keys."""
_MOUNT = f"""set -e
mount --all --fstab "$1/fstab"
cp -R "$1/home/." "$2/." "$1/root{HOME}"
mount --all --fstab "$1/fstab_home"
mount -t proc -o nosuid,nodev,noexec proc "$1/root/proc" 2>/dev/null || :  # denied within some containers
cd "$1/root"
pivot_root . old
umount --lazy /old
for name in shmmni msgmni; do echo 0 2>/dev/null >/proc/sys/kernel/$name || :; done
mount --rbind / /old
shift 2
set +e
"""
"""Arguments: the folder of the sandbox, the program's files, the command. The shell stays, as process 1: signals and
orphans are those of any other process, and its end ends all of them. What is read below the program's home, such as a
virtual environment in /tmp, is mounted after the home. The program's root is a second mount of the whole: the kernel
makes no user namespace for a process in chroot, in which a program would mount file systems without a limit. Shared
memory and queues of System V, which no limit of a process counts, are switched off in the namespace, where the kernel
lets its root (a user namespace: since Linux 5.19)."""


class Isolation(Enum):
    """A way to start a program."""

    NAMESPACES = auto()
    """Namespaces that root makes; the program is another user."""
    BUBBLEWRAP = auto()
    USER_NAMESPACE = auto()
    """Namespaces that a user makes."""
    OTHER_USER = auto()
    """No namespaces; root starts the program as another user."""
    LIMITS = auto()
    """Limits of the process, its environment and its folder alone; never chosen unless the config accepts it."""

    @property
    def absent(self) -> tuple[str, ...]:
        """Protections that a program lacks."""
        return _ABSENT.get(self, ())


_ABSENT = {
    Isolation.OTHER_USER: ("it has the network", "it reads files that everyone may read", _FILES_UNCOUNTED),
    Isolation.LIMITS: (
        "it has the network",
        "it reads and writes the files of this user",
        "it reads the memory and the environment of this user's other processes",
        "it may end the processes of this user, the run too",
        _UNCOUNTED,
        _FILES_UNCOUNTED,
        "its processes survive it where they leave its process group",
    ),
}


class LocalSandbox:
    """Runs programs on this machine.

    Attributes:
        isolation: the strongest isolation that works here.
        failures: why those that are stronger do not, each with its name.
    """

    def __init__(self, config: SandboxConfig) -> None:
        """Choose the strongest isolation that works here.

        Raises:
            UserError: if the system is not Linux with util-linux, no program runs, no isolation works and the config
                does not accept limits alone, or a protection is absent and the config is strict.
        """
        missing = [name for name in ("prlimit", "setpriv") if shutil.which(name) is None]
        if missing:
            raise UserError(
                "sandbox.kind local needs Linux with util-linux, this system has no "
                f"{' and no '.join(missing)}: install util-linux, or set sandbox.kind docker and sandbox.image"
            )
        self._config = config
        self._command = config.command or (sys.executable, "-s", "-E")
        # a folder may be a symbolic link, such as a .venv on another disk: the program sees the link and its target
        readable = [sys.base_prefix, sys.prefix, sys.executable, *config.readable]
        self._visible = outermost([*_SYSTEM, *readable, *map(os.path.realpath, readable)])
        if Path(HOME) in self._visible:
            raise UserError(f"sandbox.readable lists folders besides {HOME}, the home of a program: name those in it")
        self._temporary = tempfile.TemporaryDirectory(prefix="hybrid_rlhf_sandbox_", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        self._folder.chmod(0o711)  # other users reach the folders of their programs
        self._users = _free_users()
        # Two programs of one user would end each other; threads may share a count, but not a generator.
        self._started = itertools.count(secrets.randbelow(len(self._users) or 1))
        self._prepare_root()
        self.isolation, self.failures = self._choose()

    def run(
        self,
        program: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> SandboxResult:
        """Run the text of a program with a standard input, and with further files in its folder."""
        files = {**(files or {}), PROGRAM: program}
        return self._run(self.isolation, files, stdin, timeout_seconds or self._config.timeout_seconds)

    def _run(self, isolation: Isolation, files: Mapping[str, str], stdin: str, timeout_seconds: float) -> SandboxResult:
        user = self._next_user()
        is_other = isolation is Isolation.OTHER_USER
        with tempfile.TemporaryDirectory(prefix="run_", dir=self._folder, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            write_files(folder, files)
            if is_other:
                for path in (folder, *folder.rglob("*")):
                    os.chown(path, user, user)
            home = name if isolation in (Isolation.OTHER_USER, Isolation.LIMITS) else HOME
            return run_process(
                [*_BEGIN, *self._command_line(isolation, folder, user, timeout_seconds)],
                stdin.encode(errors="replace"),
                env={**_ENVIRONMENT, "HOME": home, "TMPDIR": home},
                timeout_seconds=timeout_seconds,
                output_bytes=self._config.output_bytes,
                folder=folder,
                owner=user if isolation in (Isolation.NAMESPACES, Isolation.OTHER_USER) else None,
                after=partial(_clean_up, name, user if is_other else None) if home == name else lambda: None,
            )

    def _command_line(self, isolation: Isolation, folder: Path, user: int, timeout_seconds: float) -> list[str]:
        """The words that run the program of a folder."""
        command = [*self._limits(isolation, timeout_seconds), *self._command, PROGRAM]
        match isolation:
            case Isolation.BUBBLEWRAP:
                copy = ("sh", "-c", 'cp -R /files/. . && "$@"', "sh")
                return self._bubblewrap([*copy, *command], "--ro-bind", str(folder), "/files")
            case Isolation.NAMESPACES | Isolation.USER_NAMESPACE:
                drop = _as_user(user) if isolation is Isolation.NAMESPACES else ()
                command = [*_IN_HOME, "setpriv", *_NO_PRIVILEGES, *drop, *command]
                return self._unshare(isolation, folder, 'chroot /old "$@"', command)
            case Isolation.OTHER_USER:
                return ["setpriv", *_NO_PRIVILEGES, *_as_user(user), *command]
            case Isolation.LIMITS:
                return ["setpriv", "--no-new-privs", *command]

    def _limits(self, isolation: Isolation, timeout_seconds: float) -> list[str]:
        """The words that limit what follows."""
        config = self._config
        seconds = math.ceil(timeout_seconds)
        limits = {
            "cpu": f"{seconds}:{seconds + 1}",  # a signal, and a second later the end
            "as": round(config.memory_gib * GIB),
            "fsize": round(config.disk_gib * GIB),
            "nofile": OPEN_FILES,
            "core": 0,
        }
        if _UNCOUNTED not in _absent(isolation):
            limits["nproc"] = config.processes
        return ["prlimit", *(f"--{name}={value}" for name, value in limits.items())]

    def open(self) -> Container:
        """A container with an empty home, of a user of its own.

        Raises:
            UserError: if programs are not in namespaces here.
            ContainerEnded: if it does not start.
        """
        isolation, user = self.isolation, self._next_user()
        if isolation in (Isolation.OTHER_USER, Isolation.LIMITS):
            raise UserError(f"a shell that stays needs namespaces, here programs have {isolation.name.lower()}: {_FIX}")
        env = {**_ENVIRONMENT, "HOME": HOME, "TMPDIR": HOME}
        is_root, is_bubblewrap = isolation is Isolation.NAMESPACES, isolation is Isolation.BUBBLEWRAP
        if is_bubblewrap:
            stay = self._bubblewrap(STAY, "--as-pid-1")
        else:
            stay = self._unshare(isolation, self._folder / "none", 'exec chroot /old "$@"', STAY)
        process = start_container([*_BEGIN, *stay], env)
        (first,) = psutil.Process(process.pid).children()
        held = [os.pidfd_open(first.pid)]
        enter = ["nsenter", "--target", str(first.pid), "--mount", "--net", "--pid", "--ipc", "--uts"]
        if is_bubblewrap and _denies_namespaces(shutil.which("bwrap")):
            # Its mounts belong to a user namespace around that of its programs.
            with open(f"/proc/{first.pid}/ns/user") as inner:
                held.append(fcntl.ioctl(inner, _NS_GET_PARENT))
            enter += [f"--user=/proc/{os.getpid()}/fd/{held[-1]}", "--preserve-credentials"]
            enter += ["nsenter", "--target", "1", "--user", "--preserve-credentials"]
        elif not is_root:
            enter += ["--user", "--preserve-credentials"]
        enter += [*(() if is_bubblewrap else ("chroot", "/old")), *_IN_HOME]
        enter += ["setpriv", *_NO_PRIVILEGES, *(_as_user(user) if is_root else ())]
        enter += self._limits(isolation, self._config.timeout_seconds)

        remove, owner = partial(self._remove, held), user if is_root else None
        return Container(self._config, process, [*_BEGIN, *enter], env=env, owner=owner, remove=remove)

    def _remove(self, held: list[int]) -> None:
        """Kill a process by the first of these descriptors, and close them. Containers need the folder of this sandbox,
        which they keep by this method."""
        if held:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held[0], signal.SIGKILL)
        while held:
            os.close(held.pop())

    def _next_user(self) -> int:
        return self._users[next(self._started) % len(self._users)] if self._users else os.geteuid()

    def _unshare(self, isolation: Isolation, folder: Path, start: str, command: Sequence[str]) -> list[str]:
        """The words that mount the files of a folder in namespaces, where `start` runs a command."""
        return [
            *("unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"),
            *(("--user", "--map-root-user") if isolation is Isolation.USER_NAMESPACE else ()),
            *("sh", "-c", _MOUNT + start, "sh", str(self._folder), str(folder), *command),
        ]

    def _bubblewrap(self, command: Sequence[str], *options: str) -> list[str]:
        mounts: list[str] = []
        for path in self._visible:
            kind = ("--symlink", os.path.realpath(path)) if path.is_symlink() else ("--ro-bind", str(path))
            mounts += [*kind, str(path)]
        return [
            *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
            *(("--unshare-user", "--disable-userns") if _denies_namespaces(shutil.which("bwrap")) else ()),
            *("--cap-drop", "ALL", "--size", str(round(self._config.disk_gib * GIB)), "--tmpfs", HOME, *mounts),
            *("--dev", "/dev", "--proc", "/proc", *options, "--remount-ro", "/", "--chdir", HOME, *command),
        ]

    def _prepare_root(self) -> None:
        """Make the empty root of namespaces, and the table of what is mounted in it."""
        root, home, size = self._folder / "root", self._folder / "home", round(self._config.disk_gib * GIB)
        for folder in (root, home, self._folder / "none"):
            folder.mkdir()
        in_home: list[tuple[Path, Path, str, str]] = []
        mounts = [(root, root, "none", "bind,ro")]
        for path in self._visible:
            is_in_home = path.is_relative_to(HOME)
            place = home / path.relative_to(HOME) if is_in_home else _below(root, path)
            if path.is_symlink():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(os.path.realpath(path))
            else:
                _mount_point(place, path)
                (in_home if is_in_home else mounts).append((path, _below(root, path), "none", "rbind,ro,nosuid,nodev"))
        for device in map(Path, _DEVICES):
            _mount_point(_below(root, device), device)
            mounts.append((device, _below(root, device), "none", "bind"))
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            (root / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
        for name in ("old", "proc", "dev/shm", HOME[1:]):
            (root / name).mkdir(exist_ok=True)
        for place in (_below(root, Path(HOME)), root / "dev/shm"):
            mounts.append((Path("tmpfs"), place, "tmpfs", f"size={size},nr_inodes={_FILES},mode=777,nosuid,nodev"))
        for made in (root, home):
            for path in (made, *made.rglob("*")):
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o755)  # also under a umask that keeps other users out
        for name, table in (("fstab", mounts), ("fstab_home", in_home)):
            lines = (f"{_escaped(what)} {_escaped(place)} {kind} {flags} 0 0\n" for what, place, kind, flags in table)
            (self._folder / name).write_text("".join(lines))

    def _choose(self) -> tuple[Isolation, tuple[str, ...]]:
        """The first isolation in which an empty program runs, and why those before it fail."""
        failures = []
        for isolation in (*_candidates(), *self._accepted()):
            result = self._run(isolation, {PROGRAM: ""}, "", _PROBE_SECONDS)
            if result.succeeded:
                break
            failures.append(f"{isolation.name.lower()}: {result.failure}")
        else:
            raise self._refusal(failures)
        if _absent(isolation):
            absent = ", ".join(_absent(isolation))
            if self._config.strict:
                raise UserError(
                    "sandbox.strict needs all protections, here a program lacks some: "
                    f"{absent} ({'; '.join(failures)}): {_FIX}, or leave it out"
                )
            warn_once(
                f"the sandbox of programs lacks protections here ({'; '.join(failures)}). For each program: {absent}. "
                f"To have them: {_FIX}"
            )
        if isolation is Isolation.LIMITS:
            _hide_memory()
        return isolation, tuple(failures)

    def _accepted(self) -> list[Isolation]:
        """Limits alone, if the config accepts them: never for root, whose programs could do anything."""
        return [Isolation.LIMITS] if self._config.limits_alone and os.geteuid() != 0 else []

    def _refusal(self, failures: Sequence[str]) -> UserError:
        """Why no isolation works, or why the program itself does not run."""
        # With limits alone nothing but the program itself can fail; an empty one may run as root, too.
        plain = self._run(Isolation.LIMITS, {PROGRAM: ""}, "", _PROBE_SECONDS)
        if not plain.succeeded:
            return UserError(
                f"a sandbox must run {' '.join(self._command)}, an empty program fails ({plain.failure}): check "
                "sandbox.command and the limits of sandbox"
            )
        own = (
            "name a sandbox.command that every user may execute"
            if os.geteuid() == 0
            else "accept sandbox.limits_alone, with which programs have the rights of this user"
        )
        return UserError(
            "programs of a model run in namespaces, as another user or in bubblewrap, none works here "
            f"({'; '.join(failures) or 'none is installed'}): {_FIX}, or {own}"
        )


def _candidates() -> list[Isolation]:
    """Isolations that may work for this user, the strongest first."""
    if os.geteuid() == 0 and _free_users():
        # In a user namespace the program would still be root, whose processes are not limited.
        return [Isolation.NAMESPACES, Isolation.OTHER_USER]
    with_namespaces = [Isolation.USER_NAMESPACE] if shutil.which("unshare") else []
    return [*([Isolation.BUBBLEWRAP] if shutil.which("bwrap") else []), *with_namespaces]


def _absent(isolation: Isolation) -> tuple[str, ...]:
    """Protections that a program lacks in an isolation on this kernel."""
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    is_old = release < _COUNTED_BY_NAMESPACE and isolation in (Isolation.BUBBLEWRAP, Isolation.USER_NAMESPACE)
    return (*isolation.absent, _UNCOUNTED) if is_old else isolation.absent


@functools.cache
def _denies_namespaces(bubblewrap: str | None) -> bool:
    """True if bubblewrap can keep a program from user namespaces of its own (0.8 or later)."""
    if bubblewrap is None:
        return False
    words = [bubblewrap, "--help"]
    result = run_process(words, b"", env=_ENVIRONMENT, timeout_seconds=_PROBE_SECONDS, output_bytes=2**20)
    return "--disable-userns" in result.stdout + result.stderr


def _free_users() -> range:
    """Numbers of users without account, files and processes; none in a container that has few numbers."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(ranges, key=itemgetter(2))
    end = first + min(count, _MOST_USERS)
    return range(end - (end - first) // 4, end - _LAST_USERS) if count >= _LEAST_USERS else range(0)


def _hide_memory() -> None:
    """Deny the other processes of this user the memory and the environment of this one (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _as_user(user: int) -> list[str]:
    return ["--reuid", str(user), "--regid", str(user), "--clear-groups"]


def _clean_up(folder: str, user: int | None) -> None:
    """Kill all processes of a user, and remove a folder: rm(1) goes deeper than Python's recursion."""
    kill = ["setpriv", *_as_user(user), "sh", "-c", "kill -KILL -1"] if user is not None else []
    for command in filter(None, (kill, ["rm", "-rf", "--", folder])):
        run_process(command, b"", env=_ENVIRONMENT, timeout_seconds=_PROBE_SECONDS, output_bytes=0)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a program, which others may read, into a folder.

    Raises:
        UserError: for a name outside of the folder.
    """
    folder.chmod(0o755)
    for name, text in files.items():
        path = folder / name
        if path.is_absolute() and not path.is_relative_to(folder) or ".." in Path(name).parts:
            raise UserError(f"files of a program are in its folder, got {name!r}: give a relative name")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")


def outermost(paths: Sequence[str]) -> list[Path]:
    """Existing paths that are not within another, in order."""
    existing = sorted({Path(path).absolute() for path in paths if os.path.lexists(path)})
    return [path for path in existing if not any(other in path.parents for other in existing)]


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _mount_point(place: Path, path: Path) -> None:
    """Make an empty folder or file where another is mounted."""
    if path.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _escaped(path: Path) -> str:
    """A path in a line of fstab."""
    return str(path).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
