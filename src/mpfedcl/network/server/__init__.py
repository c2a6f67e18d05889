"""The server of a federation over a network: who takes part, the engine, the run."""
