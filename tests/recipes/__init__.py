"""Recipes, as a user starts them."""
