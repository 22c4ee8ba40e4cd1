"""`python -m allstep` is the program `allstep`."""

from allstep.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="allstep")
