"""Hugging Face models and tokenizers as this project uses them: the only place for model-family quirks in training."""
