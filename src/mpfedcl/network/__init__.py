"""The same federation over a network: a server, and clients on machines of their own.

`flower.py` alone knows Flower. Everything else speaks of parcels (what is in a message), of a
courier (who carries them) and of a site (a client's own machine).
"""
