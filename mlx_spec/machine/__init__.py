"""This computer: its memory, and what is remembered of it. Knows bytes and files; nothing of models."""
