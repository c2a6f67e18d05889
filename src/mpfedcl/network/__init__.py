"""The same federation over a network: a server, and clients on machines of their own.

`flower/` alone knows Flower. Everything else speaks of messages, of a transport that carries them,
and of clients.
"""
