"""Optimisers that need more than a gradient: curvature, and how to go by it."""
