"""Decode attention over a paged cache of latents."""

from pallas_kernels.mla_decode.fp8_cache import pack, unpack
from pallas_kernels.mla_decode.op import OP, SPLIT_LEN, mla_decode
from pallas_kernels.mla_decode.reference import Decoded

__all__ = ["OP", "SPLIT_LEN", "Decoded", "mla_decode", "pack", "unpack"]
