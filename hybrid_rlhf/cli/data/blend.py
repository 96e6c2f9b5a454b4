"""`hybrid-rlhf data blend a.jsonl=0.7 b.jsonl=0.3 --output OUT.jsonl`: several sources in one file."""

from __future__ import annotations

from hybrid_rlhf.configs.commands.data import BlendConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_result


@command(BlendConfig, positional="sources")
def main(config: BlendConfig) -> None:
    """Blend the sources, and print the number of rows from each."""
    from hybrid_rlhf.data.preparation.blending import blend_rows
    from hybrid_rlhf.data.rows.files import rows_file

    output = rows_file(config.output, overwrite=config.overwrite)
    taken = blend_rows(output, config.shares, rows=config.rows, seed=config.seed)
    lines = [f"{rows:,} rows of {path}" for path, rows in taken.items()]
    document = {"output": str(output), "rows": sum(taken.values()), "sources": taken}
    print_result(document, "\n".join([*lines, f"{sum(taken.values()):,} rows in {output}"]))
