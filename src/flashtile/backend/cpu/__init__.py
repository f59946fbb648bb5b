"""LLVM kernels for CPUs, generated from Python: compiled in memory for the host, cached on disk, on PyTorch's threads.

Vector lanes run over query rows. A tile of scores is kept transposed, keys by rows, so that K and V are read as they
lie in memory, one number at a time for all lanes, and maxima and sums of rows need no operation across lanes; only
queries and outputs are turned over, once for each tile.

`codegen` is the language (loops, branches, functions) and `operands` what it computes with (numbers, vectors,
pointers); `elementary` has exp2, log and tanh, `formats` how numbers lie in memory, `products` the matrix products.
`tiles`, `masking`, `scores`, `softmax` and `rng` have the four axes of an attention call, and `forward` puts them
together.
"""
