"""Which of Hopper's kernels runs: `candidates` that can, and the `cost` of each."""
