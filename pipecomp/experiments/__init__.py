"""Experiments that train: what compression costs in quality, and how its error falls with time."""
