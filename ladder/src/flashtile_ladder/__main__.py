"""`python -m flashtile_ladder`."""

from .cli.command import main

if __name__ == "__main__":
    main(prog_name="flashtile-ladder")
