"""pipecomp: fine-tune language models across machines joined by slow networks.

Importing this package loads nothing heavy: torch, numba and zmq are imported only by the modules that need them.
"""

__version__ = "0.1.0"
