"""The embedded text corpus, and the program that made it."""
