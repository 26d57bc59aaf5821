"""What passes cost on this machine: timing them, keeping the record, and who measures when. Knows contexts and the
clock; nothing of text."""
