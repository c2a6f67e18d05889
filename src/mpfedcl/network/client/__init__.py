"""A client of a federation over a network: its data, its training and its stored state."""
