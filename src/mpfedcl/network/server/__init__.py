"""The server of a federation over a network: client registry, engine and run."""
