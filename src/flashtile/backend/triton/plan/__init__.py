"""Which of Triton's kernels runs: `candidates` that can, and the `cost` of each."""
