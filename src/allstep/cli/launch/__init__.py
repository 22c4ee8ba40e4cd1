"""`allstep launch`: its words, what they come to, and the report of how it ended."""
