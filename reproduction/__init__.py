"""The paper's tables and figures, and our own studies, written with the public Python API only.

`python -m reproduction --help` lists the studies; `make reproduce STUDY=label` runs one of them.
"""
