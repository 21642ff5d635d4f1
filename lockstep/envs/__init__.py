"""Environments. Nothing here knows of learning, and nothing here imports JAX."""
