"""From files to token batches: sources, rows, chat templates, cached tokens, loaders. Knows no model."""
