"""`mlx-spec bench`: prompts, runs, figures and what is shown of them. Knows generations and clocks; no model code."""
