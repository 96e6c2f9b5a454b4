"""Complete the prompts of a file: `python inference/generate.py MODEL --input prompts.jsonl --output answers.jsonl`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hybrid_rlhf.configs.cli import parse_config, user_errors
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import GenerateConfig
from hybrid_rlhf.configs.whole_files import write_whole


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, then generate; torch is imported only after parsing."""
    with user_errors():
        words = list(sys.argv[1:] if argv is None else argv)
        config = parse_config(GenerateConfig, words, positional="path")
        _generate(config)


def _generate(config: GenerateConfig) -> None:
    from hybrid_rlhf.data.chat import encode_prompt
    from hybrid_rlhf.data.rows import prompt_row
    from hybrid_rlhf.data.sources import open_source
    from inference.loading import load_engine, sampling_params

    output = _writable(config.output)
    rows = [(row, prompt_row(place, row)) for place, row in open_source(config.input)]
    engine, tokenizer = load_engine(config)
    prompts = [encode_prompt(prompt.messages, tokenizer, tools=prompt.tools) for _, prompt in rows]
    start = time.perf_counter()
    completions = engine.generate(prompts, sampling_params(config.sampling, n=config.n))
    seconds = time.perf_counter() - start
    lines: list[str] = []
    for (row, _), samples in zip(rows, completions, strict=True):
        answers = [
            {
                "text": tokenizer.decode(sample.token_ids, skip_special_tokens=True),
                "finish_reason": sample.finish_reason,
                "logprob": sum(sample.logprobs),
            }
            for sample in samples
        ]
        # of Parquet's types some have no JSON: dates, decimals, bytes
        lines.append(json.dumps({**row, "completions": answers}, ensure_ascii=False, default=str) + "\n")
    write_whole(output, "".join(lines))
    tokens = sum(len(sample.token_ids) for samples in completions for sample in samples)
    print(f"{len(rows):,} prompts, {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} a second): {output}")


def _writable(path: str) -> Path:
    """The file to write, refused before the work rather than after it."""
    output = Path(os.path.expanduser(path))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(output.parent, os.W_OK) and (output.is_file() or not os.path.lexists(output))
    except OSError:  # a file where a folder should be
        writable = False
    if not writable:
        raise UserError(f"--output must name a file that can be written, {path} is none: choose another")
    return output


if __name__ == "__main__":
    main()
