"""MLX definitions of models and the contexts that decode with them. Knows weights and layers; nothing of rounds."""
