"""`hybrid-rlhf data split FILE --parts train=0.9,test=0.1`: files that share no prompt."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hybrid_rlhf.configs.commands.data import SplitConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.files.atomic import output_file
from hybrid_rlhf.runtime.files.reading import user_path
from hybrid_rlhf.runtime.output import print_result


@command(SplitConfig, positional="path")
def main(config: SplitConfig) -> None:
    """Split a source, and print the paths of the parts."""
    from hybrid_rlhf.data.preparation.splitting import split_rows
    from hybrid_rlhf.data.rows.files import plain_name

    source = user_path(config.path)
    folder = user_path(config.output_dir) if config.output_dir else source.parent if source.exists() else Path()
    is_new = not folder.exists()
    outputs = {
        name: output_file(folder / f"{plain_name(source)}.{name}.jsonl", "each part", overwrite=config.overwrite)
        for name, _ in config.shares
    }
    try:
        counts = split_rows(config.path, outputs, config.shares, by=config.by, seed=config.seed)
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise
    document = {"parts": {name: {"rows": counts[name], "path": str(file)} for name, file in outputs.items()}}
    print_result(document, "\n".join(f"{counts[name]:,} rows in {file}" for name, file in outputs.items()))
