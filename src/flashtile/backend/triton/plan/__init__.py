"""Which of the backend's kernels runs: `candidates` that can, and the `cost` of each."""
