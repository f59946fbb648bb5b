"""The runtime of the GPU backends: record and replay of launches."""
