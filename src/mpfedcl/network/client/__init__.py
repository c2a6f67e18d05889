"""A client of a federation over a network: its data, its training, what it keeps."""
