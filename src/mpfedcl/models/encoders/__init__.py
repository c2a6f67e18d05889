"""Frozen encoders: weights, preprocessing, and the cache of their features."""
