"""Attend over pages: rotary angles, windows, INT8 divisors, and which way to attend. Knows one layer of one pass."""
