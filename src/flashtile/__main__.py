"""`python -m flashtile`: the command line."""

from .cli import main

main()
