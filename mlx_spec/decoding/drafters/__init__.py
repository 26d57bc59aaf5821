"""Who proposes tokens, each behind the same protocol. Knows the committed tokens; nothing of what a pass costs."""
