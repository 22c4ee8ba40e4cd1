"""`allstep doctor`: what this machine has, what works, and what to type where it does not."""
