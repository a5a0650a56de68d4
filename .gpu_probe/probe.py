import sys
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.fp8_matmul import fp8_matmul, mosaic_decode
from pallas_kernels.fp8_matmul.mosaic_decode import decode_product, DecodeTile
from tests.pallas_kernels.operands import matmul_operands, exact_product
if "narrow" in sys.argv:
    old = mosaic_decode.round_up
    mosaic_decode.round_up = lambda n, k: old(n, 8 if k == 64 else k)
for m, n, k in ((1, 1, 1), (1, 1, 13), (1, 8, 128), (1, 13, 1), (8, 8, 128), (8, 1, 128)):
    a, b = matmul_operands(m, n, k)
    rows = jnp.pad(a.values, ((0, 8 - m), (0, 0)))
    sc = jnp.pad(a.scales, ((0, 8 - m), (0, 0))).T
    for t in (DecodeTile(2, 1, 6), DecodeTile(1, 1, 6)):
        out = jax.jit(lambda a, b, sa, sb: decode_product(a, b, a_scales=sa, b_scales=sb, num_columns=n, tile=t, out_dtype=jnp.bfloat16))(rows, b.values, sc, b.scales)
        out = np.asarray(out, np.float32)
        want = exact_product(a, b)
        print(m, n, k, t, out.shape, "err", np.abs(out[:m, :n] - want).max() / np.abs(want).max(), flush=True)
    whole = np.asarray(jax.jit(lambda a, b: fp8_matmul(a, b, backend="mosaic_gpu"))(a, b), np.float32)
    print("   op", whole.ravel()[:3], want.ravel()[:3], "a", np.asarray(a.values[0,:3], np.float32), "sa", a.scales[0,:2], "sb", b.scales[0,:2], flush=True)
