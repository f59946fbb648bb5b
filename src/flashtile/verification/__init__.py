"""Random problems, run by backends and compared with the fp64 oracle."""
