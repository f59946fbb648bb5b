"""The search for tiles, which is never made at call time: `flashtile tune` makes it, and saves what it found."""
