"""`python -m flashtile`: the command line."""

from .cli import main

main(prog_name="python -m flashtile")
