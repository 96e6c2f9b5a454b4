"""Description of a model by numbers, without weights or computation.

Read `model_description.py` (the numbers, and the part of a model on a tensor-parallel rank), `recurrence.py` (those of
recurrent layers) and `hugging_face.py` (from a model to its description).
"""
