"""What is learned and in which order. Sees generation only as prompts in, completions out."""
