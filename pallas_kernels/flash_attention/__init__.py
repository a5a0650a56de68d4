"""Attention for training and prefill: packed rows, grouped heads, MLA's head dims."""

from pallas_kernels.flash_attention.op import OP, flash_attention

__all__ = ["OP", "flash_attention"]
