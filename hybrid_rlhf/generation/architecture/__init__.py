"""What a model is, as numbers: no weights and no computation.

Read `model_description.py` (the numbers), `recurrence.py` (those of recurrent layers), `hugging_face.py` (from a model
to its description) and `split.py` (the part of a model on a tensor-parallel rank).
"""
