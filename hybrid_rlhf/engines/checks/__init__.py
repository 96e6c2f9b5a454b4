"""Checks after each weight sync: the forward of fixed tokens, and elements of the weights.

Read `weight_check.py` first.
"""
