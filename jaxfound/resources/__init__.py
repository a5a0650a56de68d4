"""The resource layer: what machine this is, and what a run leaves on it.

Topology, host checks, logs, metrics, step times, signals; checkpoints have a room of their own.
Import the files: this page stays light, so that a command line starts fast.
"""
