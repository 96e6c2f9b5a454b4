"""Entry points of the three steps, one folder each."""
