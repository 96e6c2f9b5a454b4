"""`hybrid-rlhf demo`: all steps on the embedded model and the embedded conversations, sized for two CPU cores.

It is `train` without a model, but downloads the embedded model if it is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import DemoConfig, PipelineConfig
from hybrid_rlhf.runtime.command_line import parse_config, user_errors


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Download the embedded model if necessary, then train.

    Args:
        argv: overrides of the demo's settings; None: the arguments of the process.
        prog: name of the command in --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with user_errors():
        parse_config(DemoConfig, words, prog=prog, defaults=train.DEMO)  # for --help
        config = parse_config(PipelineConfig, words, prog=prog)
        if not config.is_demo:
            raise UserError(
                "the demo trains the embedded model, got another model to start from: use `hybrid-rlhf train` for it"
            )
        from hybrid_rlhf.models.pretrained.embedded import (
            CACHE,
            REQUIREMENT,
            download_embedded_model,
            find_embedded_model,
        )

        if find_embedded_model() is None:
            print(f"== demo: downloading the embedded model, 94 MiB, once ({REQUIREMENT}) into {CACHE}", flush=True)
            download_embedded_model()
    train.main(words, prog=prog)
