"""Every causal LM of transformers, tiny: generation, training, adapters, reward models."""
