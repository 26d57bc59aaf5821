"""Measuring how fast each way of decoding is: prompts, interleaved runs, figures, and how those are shown."""
