"""Names of files in a run folder, in a module without torch, for readers of run folders."""

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
FINISHED_FILE = "finished.json"
LOG_FILE = "log.txt"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
