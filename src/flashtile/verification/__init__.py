"""Random problems, run by backends and held against the fp64 oracle."""
