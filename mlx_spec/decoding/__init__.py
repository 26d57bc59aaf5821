"""Rounds over token ids: who drafts how many, how the target decides, what is committed. Knows contexts and
distributions; nothing of text or layers."""
