"""Runs: training, and what is done with its results."""
