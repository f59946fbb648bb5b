"""`python -m flashtile_ladder.cli`: the command `flashtile-ladder`."""

from .command import main

if __name__ == "__main__":
    main(prog_name="flashtile-ladder")
