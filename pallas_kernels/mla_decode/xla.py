"""MLA decode through XLA: gathers the pages; serves every case on every device."""

from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.mla_decode import reference
from pallas_kernels.mla_decode.cases import MlaCase
from pallas_kernels.mla_decode.reference import Decoded


def refuses(case: MlaCase) -> None:
    """Nothing is refused."""
    return None


def run(
    q: Float[Array, "batch queries heads width"],
    cache: Shaped[Array, "pages page cache_width"],
    block_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    *,
    case: MlaCase,
    sm_scale: float,
    split_len: int | None,
) -> Decoded:
    """Return the op's result in one part: `split_len` changes nothing here."""
    return reference.mla_decode(
        q,
        cache,
        block_table=block_table,
        lengths=lengths,
        latent=case.latent,
        sm_scale=sm_scale,
    )
