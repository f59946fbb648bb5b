"""`flashtile ladder`."""
