"""Data: named sets, readers, partitions."""
