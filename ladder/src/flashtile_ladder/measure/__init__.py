"""What the course measures and counts: bytes, rounding, memory, and claims of others."""
