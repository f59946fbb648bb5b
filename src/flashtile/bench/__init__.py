"""Measurements of attention: this library and others, on the same inputs, in one process.

`sweep` reads which cells to measure, `inputs` makes a cell's tensors, `providers/` has one file for each library,
`check` holds every result against the fp64 oracle before it is timed, `clocks/` knows how time passes on a device,
`rounds` interleaves, `fresh` measures in processes of their own, `run` puts them together, `results` stores them.
"""
