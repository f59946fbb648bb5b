"""The ways to compute a call, fastest first. Importing this package loads no backend."""
