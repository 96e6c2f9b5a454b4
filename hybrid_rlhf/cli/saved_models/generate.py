"""`hybrid-rlhf generate MODEL --prompt TEXT`, or `--input FILE --output FILE`: complete prompts."""

from __future__ import annotations

import time
from typing import Any

from hybrid_rlhf.configs.inference import GenerateConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.observability.logs import LOADING_LIBRARIES, logger
from hybrid_rlhf.runtime.output import print_result


@command(GenerateConfig, positional="path")
def main(config: GenerateConfig) -> None:
    """Complete the prompts, and print or write them."""
    logger.info(LOADING_LIBRARIES)
    from hybrid_rlhf.cli.saved_models.loading import image_content, load_engine
    from hybrid_rlhf.data.chat.reasoning import text_decoder
    from hybrid_rlhf.data.rows.files import json_line, rows_file
    from hybrid_rlhf.data.rows.formats import read_prompt_row
    from hybrid_rlhf.data.rows.sources import open_source
    from hybrid_rlhf.generation.image_loading import PromptEncoder
    from hybrid_rlhf.runtime.observability.progress import ProgressLog

    output = None if config.output is None else rows_file(config.output, overwrite=config.overwrite)
    asked = {"prompt": config.prompt} | ({"images": config.image} if config.image else {})
    located_rows = [*open_source(config.input)] if config.input is not None else [("--prompt", asked)]
    rows = [(row, read_prompt_row(where, row, refusal="")) for where, row in located_rows]
    if config.image:
        rows[0][1].images[:] = map(image_content, config.image)
    engine, tokenizer = load_engine(config)
    encode = PromptEncoder(tokenizer, engine.image_reader, max_pixels=config.max_image_pixels)
    prompts = [
        encode(where, prompt.messages, prompt.images, tools=prompt.tools)
        for (where, _), (_, prompt) in zip(located_rows, rows, strict=True)
    ]
    shown = text_decoder(tokenizer)
    start = time.perf_counter()
    progress = ProgressLog("completing", total=len(prompts) * config.sampling.n, unit="completions")
    completions = engine.generate(
        [ids for ids, _ in prompts],
        config.sampling,
        on_completed=progress.advance,
        images=[images for _, images in prompts],
    )
    seconds = time.perf_counter() - start
    completed: list[dict[str, Any]] = []
    for (row, _), samples in zip(rows, completions, strict=True):
        generated = [
            {
                "text": shown(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "logprob": sum(sample.logprobs),
            }
            for sample in samples
        ]
        completed.append({**row, "completions": generated})
    if output is None:
        texts = [sample["text"] for sample in completed[0]["completions"]]
        print_result(completed[0], "\n---\n".join(texts))
        return
    write_whole(output, b"".join(map(json_line, completed)))
    tokens = sum(len(sample.token_ids) for samples in completions for sample in samples)
    rate = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens per second"
    document = {"output": output, "prompts": len(rows), "tokens": tokens, "seconds": seconds}
    print_result(document, f"{len(rows):,} prompts, {rate}: {output}")
