"""`allstep bench`: this package against its peers, on the machine at hand. `command` is the place to begin."""
