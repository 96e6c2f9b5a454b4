"""`hybrid-rlhf plan`: the memory that each phase of `hybrid-rlhf train` needs, the same as `train --plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybrid_rlhf.cli import train


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Print the plan of the line that `train` would run; exit code 1 if a phase does not fit."""
    train.main([*(sys.argv[1:] if argv is None else argv), "--plan=true"], prog=prog)


if __name__ == "__main__":
    main()
