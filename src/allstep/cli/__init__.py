"""The program `allstep`: one module a command."""
