"""A run's weights beside a text: its loss with any products in fp8, and numbers of its operands.

One program reads the text: which products are in fp8 is an argument of it, so that every choice is
the same compiled program. A second one, a forward and a backward pass, counts operands.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfound.config.layer_formats import StackOfLayers, stacks_of
from jaxfound.config.precision import PrecisionConfig
from jaxfound.config.run import RunConfig
from jaxfound.data.batch import Batch
from jaxfound.data.text_rows import TextRows, edges_of, read_texts, rows_of
from jaxfound.data.tokenizer import check_vocabulary, load_tokenizer
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Arrays, Frame
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.parallelism.mesh import jit_on_mesh
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.resources.topology import Device
from jaxfound.training.batches import local_rows, to_devices
from jaxfound.training.compare import (
    Judge,
    load_arrays,
    make_judge,
    measure,
    num_rows,
    with_rows,
    without_stages,
)
from jaxfound.training.objective import terms_of, token_counts
from jaxfound.training.operand_numbers import (
    OperandNumbers,
    Sums,
    added,
    no_sums,
    numbers_of,
    sums_of,
)
from jaxfound.training.step import batch_sharding
from jaxfound.training.tried_kernels import Chosen, Watched, replaced
from pallas_kernels.formats import WEIGHT

# Counts are taken once, so that compiling them is what takes the time: half of it this way.
SOON_COMPILED = {"xla_backend_optimization_level": 0}
# Whether each layer's product is in fp8, by path of the operation [layers of the stack].
type Choice = dict[str, np.ndarray]


@dataclass(frozen=True)
class Bench:
    """Weights, a text and the program that reads it.

    Attributes:
        frame: the model, all in the compute format.
        arrays: its weights.
        stacks: its layers.
        rows: the text.
        size: rows at a time.
        judge: the program.
        mesh: what it runs on.
    """

    frame: Frame
    arrays: Arrays
    stacks: tuple[StackOfLayers, ...]
    rows: TextRows
    size: int
    judge: Judge
    mesh: Mesh

    @property
    def sharding(self) -> NamedSharding:
        """Where the rows of a batch lie."""
        return batch_sharding(self.frame, self.mesh)

    @property
    def operations(self) -> list[tuple[str, range]]:
        """Paths of all operations, and their layers."""
        return [(path, stack.layers) for stack in self.stacks for path in stack.operations]

    @property
    def linears(self) -> list[tuple[str, range]]:
        """Those whose operands are counted: of experts each row's would have to be told apart."""
        return [each for each in self.operations if f"{each[0]}.kernel" in self.frame.linears]

    def nats(self, choice: Choice) -> np.ndarray:
        """Return the loss of each piece with the chosen products in fp8, nats [P]."""

        def chosen(path: str, kernel: jax.Array) -> Chosen:
            place = NamedSharding(self.mesh, PartitionSpec())
            return Chosen(kernel, jax.device_put(choice[path], place))

        params = replaced(self.arrays.params, [path for path, _ in self.operations], chosen)
        weights = (Arrays(params, self.arrays.buffers),)
        tally = measure(self.judge, weights, self.rows, size=self.size, sharding=self.sharding)
        return tally.nats[0]

    def choice(self, is_fp8: Callable[[str, int], bool]) -> Choice:
        """Return which products are in fp8, asked by path and number of the layer."""
        return {
            path: np.array([is_fp8(path, n) for n in layers]) for path, layers in self.operations
        }


def prepared(
    cfg: RunConfig,
    there: RunDirectory,
    *,
    step: int | None,
    min_tokens: int | None,
    devices: Sequence[Device],
) -> tuple[Bench, int]:
    """Return a run's weights beside a text, and the step they are of."""
    table = describe(cfg.model)
    cfg = without_stages(cfg)
    size = num_rows(cfg, len(devices))
    plan = make_plan(with_rows(cfg, size), len(devices), params=table)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    check_vocabulary(tokenizer, vocab_size=cfg.model.vocab_size)
    texts = read_texts(cfg.data, tokenizer, min_tokens=min_tokens)
    mesh = build_mesh(plan, devices=devices)
    plain = PrecisionConfig(compute=cfg.precision.compute)
    frame = Frame(cfg.model, execution=execution_of(plan, plain))
    arrays, found = load_arrays(there, frame, mesh=mesh, step=step)
    edges = edges_of(tokenizer, step=found)
    rows = rows_of(texts, tokenizer, edges=edges, seq_len=cfg.train.seq_len)
    judge = make_judge((frame,), chunk=cfg.train.loss_chunk, mesh=mesh)
    return Bench(frame, arrays, tuple(stacks_of(table)), rows, size, judge, mesh), found


def operands_of(cfg: RunConfig, bench: Bench) -> list[OperandNumbers]:
    """Return the numbers of every linear operation's operands in the compute format.

    Padding counts as what it is computed as; the rows are packed, so that there is little.
    """
    count, total = make_counts(cfg, bench), dict[str, tuple[Sums, Sums]]()
    own = local_rows(bench.sharding, bench.size, seq_len=bench.rows.seq_len)
    num_batches = 0
    for batch, _ in bench.rows.batches(bench.size):
        mine = Batch(*(values[own] for values in batch))
        placed = to_devices(mine, bench.sharding, batch_size=bench.size)
        found = jax.device_get(count(bench.arrays, placed))
        for path, (of_input, of_gradient) in found.items():
            before = total.get(path, (None, None))
            total[path] = added(before[0], of_input), added(before[1], of_gradient)
        num_batches += 1
    weights = weight_sums(bench)
    rows: list[OperandNumbers] = []
    for path, layers in bench.linears:
        named = {"path": path, "layers": layers}
        rows += numbers_of(total[path][0], operand="input", num_batches=num_batches, **named)
        rows += numbers_of(weights[path], operand="weight", **named)
        gradient = total[path][1]
        rows += numbers_of(gradient, operand="output gradient", num_batches=num_batches, **named)
    return rows


def make_counts(
    cfg: RunConfig, bench: Bench
) -> Callable[[Arrays, Batch], Mapping[str, tuple[Sums, Sums]]]:
    """Return the program that counts the inputs and output gradients of every operation."""
    frame, paths = bench.frame, [path for path, _ in bench.linears]

    def loss(sums: dict[str, tuple[Sums, Sums]], arrays: Arrays, batch: Batch) -> jax.Array:
        params = replaced(arrays.params, paths, lambda path, kernel: Watched(kernel, *sums[path]))
        terms = terms_of(frame.bind(params, arrays.buffers), batch, cfg=cfg)
        return terms.nats / token_counts(batch, num_depths=0).targets

    def count(arrays: Arrays, batch: Batch) -> dict[str, tuple[Sums, Sums]]:
        with jax.sharding.use_abstract_mesh(bench.mesh.abstract_mesh):
            nothing = {path: (no_sums(*sizes[0]), no_sums(*sizes[1])) for path, sizes in shapes}
            return jax.grad(loss)(nothing, arrays, batch)

    shapes = [(path, channels_of(bench, path)) for path in paths]
    placed = NamedSharding(bench.mesh, PartitionSpec())
    return jit_on_mesh(count, bench.mesh, out_shardings=placed, compiler_options=SOON_COMPILED)


def channels_of(bench: Bench, path: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return layers and channels of an operation's input, and of its output."""
    layers, *sizes = bench.arrays.params[f"{path}.kernel"].shape
    split = inputs_of(bench)[path]
    return (layers, int(np.prod(sizes[:split]))), (layers, int(np.prod(sizes[split:])))


def inputs_of(bench: Bench) -> Mapping[str, int]:
    """Return how many dims each operation contracts, by path."""
    return {path.removesuffix(".kernel"): m.num_inputs for path, m in bench.frame.linears.items()}


def weight_sums(bench: Bench) -> dict[str, Sums]:
    """Return the sums of every kernel in squares, with its inputs as channels."""

    def of_kernel(kernel: jax.Array, *, num_inputs: int) -> Sums:
        def of_layer(layer: jax.Array) -> Sums:
            matrix = layer.reshape(inputs, -1).astype(bench.frame.execution.dtype)
            # Squares are squares either way round; sums have their channels last.
            return sums_of(matrix.T, WEIGHT)

        inputs = int(np.prod(kernel.shape[1 : 1 + num_inputs]))
        return jax.lax.map(of_layer, kernel)

    split = inputs_of(bench)
    kernels = {path: bench.arrays.params[f"{path}.kernel"] for path, _ in bench.linears}
    placed = NamedSharding(bench.mesh, PartitionSpec())
    every = jit_on_mesh(
        lambda given: {path: of_kernel(k, num_inputs=split[path]) for path, k in given.items()},
        bench.mesh,
        out_shardings=placed,
        compiler_options=SOON_COMPILED,
    )
    return jax.device_get(every(kernels))
