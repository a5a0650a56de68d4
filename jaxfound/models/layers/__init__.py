"""Layers of the decoder, one idea a file."""
