"""LLVM kernels for CPUs, generated from Python: compiled in memory for the host, cached on disk, on PyTorch's threads.

Vector lanes run over query rows. A block of scores is kept transposed, `[keys, rows]`, so that row maxima and sums need
no horizontal operations, and K and V are read in place, one element at a time, broadcast to all lanes. Only queries and
outputs are transposed, once for each tile.

Host code: `entry`, `host_forward` and `host_backward`, with `arguments` (the argument block), `lengths` (the table of
sequences), `launch`, `threads`, `machine_code`, `jit` and `targets`; it shares `variant`, `workspace` and `tables` with
the kernel generators in `kernels/`: `codegen` and `operands` are the IR builder; `elementary`, `formats` and `products`
are arithmetic; `fields` and `buffers` are arguments and workspace in generated code; `tiles`, `masking`, `scores`,
`softmax` and `rng` are the parts of attention; `forward`, `decode` and `backward` combine them. `formula`, `captured`,
`stages` and `dcaptured` make code of score_mod and mask functions.
"""
