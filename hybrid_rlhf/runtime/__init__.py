"""The process group, seeds, logs, metrics and timers. The only place that calls a collective on the default group."""
