"""The .gguf format: its configuration, weights and tokenizer, as a checkpoint of the hub has them."""
