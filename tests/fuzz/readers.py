"""The fuzzer: `python -m tests.fuzz.readers --target yaml --seconds 120`, with atheris (libFuzzer) under it.

An input that a reader does not survive ends it, is kept in tests/fuzz/corpus/TARGET/, and is read again by every run of
the tests from then on.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
_INSTRUMENTED = [
    "hybrid_rlhf.configs",
    "hybrid_rlhf.data",
    "hybrid_rlhf.models",
    "hybrid_rlhf.runtime.files.checkpoint_folder",
    "hybrid_rlhf.engines.ds_config",
    "yaml",
    "pydantic",
]
_ADDRESS_SPACE_GIB = 24
"""A config of a model may ask for any amount of memory."""


def main() -> int:
    """Fuzz in a process of its own, which libFuzzer ends; say how many inputs it ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="all", help="a name of targets.TARGETS, or all in one process")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0: a new one each time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        fuzz(options.target, options.seconds, options.seed)
    line = [sys.executable, "-m", "tests.fuzz.readers", "--child", *sys.argv[1:]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", env=environment, check=False)
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    print(f"{options.target}: {executed[1] if executed else 'no'} inputs, exit code {done.returncode}")
    if done.returncode:
        output = done.stdout + done.stderr
        print(output[max(0, output.find("Uncaught Python exception")) :][:4000])
    return done.returncode


def fuzz(name: str, seconds: int, seed: int) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    beginnings = Path(tempfile.mkdtemp(prefix="seeds"))
    with atheris.instrument_imports(include=_INSTRUMENTED):
        from tests.fuzz import targets

        target = targets.all_targets if name == "all" else targets.TARGETS[name]
        for number, data in enumerate(targets.seeds(name)):
            (beginnings / str(number)).write_bytes(data)
            target(data)  # what is imported on the way takes its time, and is instrumented, here
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_GIB * 2**30,) * 2)
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)

    def one(data: bytes) -> None:
        start = time.process_time()  # not the clock's: the machine may be busy with something else
        target(data)
        assert time.process_time() - start < targets.SECONDS, "a hang"

    atheris.Setup(
        [
            sys.argv[0],
            str(beginnings),
            f"-max_total_time={seconds}",
            f"-artifact_prefix={kept}/",
            f"-seed={seed}",
            "-timeout=30",
            "-rss_limit_mb=0",
            "-max_len=4096",
            "-len_control=0",
            "-print_final_stats=1",
        ],
        one,
    )
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(beginnings, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
