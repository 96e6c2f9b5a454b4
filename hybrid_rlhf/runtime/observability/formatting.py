"""Formats numbers and durations for the log, the progress bar, the report and model cards."""

from __future__ import annotations


def format_value(value: float) -> str:
    """A number in about ten characters: 48,670, 0.1235, 1.00e-05."""
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: 2 h 5 min, 3 min 20 s, 4.2 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def format_clock(seconds: float) -> str:
    """Whole seconds as on a clock: 0:03:20, 26:00:00."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
