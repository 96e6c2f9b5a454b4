"""`hybrid-rlhf data check FILE`: a source as a step reads it, and every problem of its rows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.cli.data.convert import problem_lines
from hybrid_rlhf.configs.commands.data import CheckConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_result

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from hybrid_rlhf.data.images.expansion import ImageRules
    from hybrid_rlhf.data.preparation.checking import CheckReport, RowPreview

_SHOWN_CHARACTERS = 600
_BAR = 40


@command(CheckConfig, positional="path")
def main(config: CheckConfig) -> None:
    """Check a source; exit code 1 if there is something to correct."""
    from hybrid_rlhf.data.images.expansion import ImageRules
    from hybrid_rlhf.data.preparation.checking import check_source

    tokenizer, images = None, ImageRules(max_pixels=config.max_image_pixels)
    if config.tokenizer is not None:
        tokenizer, images = _tokenizer(config, config.tokenizer)

    report = check_source(
        config.path,
        task=config.task,
        tokenizer=tokenizer,
        limit=config.max_length,
        previews=config.preview,
        eval_sources=config.eval_sources,
        images=images,
    )
    print_result(_document(report), _text(report, has_tokenizer=tokenizer is not None))
    if not report.is_clean:
        sys.exit(1)


def _tokenizer(config: CheckConfig, model: str) -> tuple[PreTrainedTokenizerBase, ImageRules]:
    """The tokenizer of a model, and what becomes of images."""
    from hybrid_rlhf.generation.image_loading import image_rules
    from hybrid_rlhf.models.pretrained.sources import resolve_model
    from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
    from hybrid_rlhf.runtime.world import default_device, solo_world

    path = resolve_model(model, world=solo_world(default_device()))
    trusted = config.trust_remote_code
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=trusted,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    return tokenizer, image_rules(path, tokenizer, max_pixels=config.max_image_pixels, trust_remote_code=trusted)


def _document(report: CheckReport) -> dict[str, Any]:
    tokens = None
    if report.lengths:
        tokens = {
            "limit": report.limit,
            "too_long": report.too_long,
            "unusable": report.unusable,
            "total": sum(report.lengths),
            "longest": max(report.lengths),
            "histogram": _bins(report.lengths),
            "images": _bins(report.image_tokens),
            "unrendered": dict(report.unrendered),
        }
    return {
        "path": report.path,
        "task": report.task,
        "rows": report.rows,
        "columns": dict(report.columns),
        "read_as": dict(report.forms),
        "ties": report.ties,
        "notes": report.notes,
        "tokens": tokens,
        "previews": [
            {
                "location": preview.location,
                "tokens": preview.tokens,
                "learned_as": preview.learned_as,
                "spans": [{"text": text, "learned": learned} for text, learned in preview.spans],
            }
            for preview in report.previews
        ],
        "problems": report.problems.count,
        "problem_texts": report.problems.texts,
        "duplicates": report.duplicates.count,
        "duplicate_texts": report.duplicates.texts,
        "overlap": report.overlap.count,
        "overlap_texts": report.overlap.texts,
    }


def _bins(tokens: list[int]) -> list[dict[str, int]]:
    from hybrid_rlhf.data.rows.counts import histogram

    return [{"from": first, "to": last, "rows": count} for first, last, count in histogram(tokens)]


def _text(report: CheckReport, *, has_tokenizer: bool) -> str:
    """The report as text for the console, in colour on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    with console.capture() as captured:
        for line in _summary(report):
            console.print(Text(line), soft_wrap=not console.is_terminal)
        if not has_tokenizer:
            console.print("give --tokenizer MODEL for lengths, loss masks and previews")
        for preview in report.previews:
            _print_preview(console, preview, has_loss=report.task in ("sft", "preference"))
        findings = {
            "duplicate row": report.duplicates,
            "overlapping held-out row": report.overlap,
            "problem": report.problems,
        }
        for noun, problems in findings.items():
            for line in problem_lines(problems.texts, problems.count, noun):
                console.print(Text(line, style="red"))
        counts = [_counted(problems.count, noun) for noun, problems in findings.items() if problems.count]
        console.print(Text(", ".join(counts), style="bold red") if counts else Text("no problems", "bold green"))
    return captured.get().rstrip("\n")


def _summary(report: CheckReport) -> list[str]:
    if not report.rows:
        return ["no row can be read"]
    columns = ", ".join(f"{name} ({count:,})" for name, count in report.columns.most_common())
    lines = [f"{_counted(report.rows, 'row')} for {report.task}; columns: {columns}"]
    for form, count in report.forms.most_common():
        lines.append(f"{_counted(count, 'row')} {'is' if count == 1 else 'are'} read as {form}")
    if report.ties:
        lines.append(f"{_counted(report.ties, 'row')} with tie true {'is' if report.ties == 1 else 'are'} left out")
    lines += [f"note: {note}" for note in report.notes]
    if not report.lengths:
        return lines
    lines.append(f"{sum(report.lengths):,} tokens in {_counted(len(report.lengths), 'row')}; lengths in tokens:")
    lines += _bars(report.lengths)
    if report.image_tokens:
        rows = _counted(len(report.image_tokens), "row")
        lines.append(f"{sum(report.image_tokens):,} tokens of images in {rows}; tokens of images:")
        lines += _bars(report.image_tokens)
    lines.append(
        f"longer than {report.limit:,} tokens, dropped or truncated by data.too_long: "
        f"{_counted(report.too_long, 'row')}; with nothing to learn within the limit, dropped: "
        f"{_counted(report.unusable, 'row')}"
    )
    if report.unrendered:
        names = ", ".join(f"{name} ({count:,})" for name, count in report.unrendered.most_common())
        lines.append(f"not rendered by the chat template, or not as it is written: {names}")
    return lines


def _bars(tokens: list[int]) -> list[str]:
    bins = _bins(tokens)
    most = max(each["rows"] for each in bins)
    lines = [
        f"  {each['from']:>7,} to {each['to']:>7,} {each['rows']:>9,}  {'█' * round(_BAR * each['rows'] / most)}"
        for each in bins
    ]
    return [line.rstrip() for line in lines]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _print_preview(console: Console, preview: RowPreview, *, has_loss: bool) -> None:
    """Print the spans of a row; learned spans are green and marked in the margin."""
    from rich.text import Text

    learned = preview.learned_as
    about = f", {preview.learned_tokens:,} with loss" if has_loss else ""
    console.print(Text(f"\n{preview.location}: {preview.tokens:,} tokens{about}", style="bold"))
    margin = len(learned) + 2 if preview.learned_tokens else 0
    for text, is_learned in preview.spans:
        if len(text) > _SHOWN_CHARACTERS:
            text = f"{text[: _SHOWN_CHARACTERS // 2]} ... {text[-_SHOWN_CHARACTERS // 2 :]}"
        begin = f"{learned}: " if is_learned else " " * margin
        # The next span begins a new line.
        body = text.removesuffix("\n").replace("\n", "\n" + " " * margin)
        console.print(Text(begin + body, style="green" if is_learned else "dim"))
