"""Parallelism. Knows nothing of learning, only trees of arrays."""
