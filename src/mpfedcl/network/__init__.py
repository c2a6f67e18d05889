"""A federation over a network: a server, and clients on their own machines.

Only `flower/` uses Flower. The other modules use messages and the interface `Transport`.
`flower/superlink.py` authenticates clients by the keys that `setup/keys.py` makes.
"""
