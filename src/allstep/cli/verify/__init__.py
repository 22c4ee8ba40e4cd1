"""`allstep verify`: whether a script does the same at any world size, and if not, from where on and why."""
