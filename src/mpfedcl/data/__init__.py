"""Image sets: read, split among clients, turned into tensors; public ones fetched and prepared."""
