"""What a program imports: text in, text out, from a target and perhaps its draft. Knows prompts, answers and requests;
nothing of layers or rounds."""
