"""Objectives of supervised training, one per file.

Read `sft.py` first, then `reward_pairs.py` and `reward_labels.py` (reward models) and `distillation.py`.
"""
