"""Kernels that know arrays and tiles and nothing of models."""
