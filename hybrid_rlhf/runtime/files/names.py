"""Names of what a run folder has. Why apart: what reads run folders without running needs no torch."""

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
FINISHED_FILE = "finished.json"
LOG_FILE = "log.txt"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
