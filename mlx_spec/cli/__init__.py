"""The command line: commands, what they show, and how they end. Knows options and the terminal; no model code."""
