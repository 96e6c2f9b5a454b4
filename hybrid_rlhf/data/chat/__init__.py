"""Tokenises conversations with the tokenizer's chat template.

Read `conversation.py` first (tokens and loss mask of a conversation), then `template.py` (rendering, and a template's
treatment of roles, earlier turns and reasoning), `messages.py` (one message) and `forms.py` (the formats that templates
expect). `calls.py` reads the tool calls that a model has written.
"""
