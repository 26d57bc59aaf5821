"""A name becomes weights, a configuration and a tokenizer. Knows files, the catalogue and the hub; nothing of
generation."""
