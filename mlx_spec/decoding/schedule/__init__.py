"""How many tokens to draft next, and by whom. Knows offers, costs and outcomes; never token ids, no device."""
