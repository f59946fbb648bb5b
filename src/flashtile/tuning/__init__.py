"""The search for tiles of `flashtile tune`. Calls never search."""
