"""The same dense model in PyTorch, to time against: torch.compile, fused AdamW, bfloat16 autocast.

Run as a process of its own, since PyTorch and JAX would each take most of a GPU's memory:
`python -m jaxfound.training.torch_peer` reads a `PeerModel` as JSON and writes a `PeerTimes`; where
PyTorch is not installed it says so and ends with 1.
Weights and moments are float32 and nothing is computed again, as a PyTorch user would start; of
what our step does it leaves out the gradient norm, the clipping and the check for numbers that are
not finite.
"""

import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NUM_BATCHES = 8
RATE = 1e-6
NO_TORCH = "PyTorch is not installed"


@dataclass(frozen=True)
class PeerModel:
    """A dense decoder with grouped-query attention and SwiGLU, and how it is timed."""

    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    ties_embeddings: bool
    batch_size: int
    seq_len: int
    rounds: int
    steps_per_round: int


@dataclass(frozen=True)
class PeerTimes:
    """What was measured.

    Attributes:
        torch: its version.
        parameters: of the model.
        compile_s: seconds of the first step.
        step_s: seconds of a step, one mean a round.
        peak_bytes: most memory that its allocator held; 0 on a CPU.
        loss: of the last step, nats a token.
    """

    torch: str
    parameters: int
    compile_s: float
    step_s: tuple[float, ...]
    peak_bytes: int
    loss: float


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Return heads [B N T H] turned by RoPE's angles [T H/2]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return import_module("torch").cat(turned, dim=-1).to(x.dtype)


def make_model(cfg: PeerModel) -> Any:
    """Return the module; its forward pass takes ids and targets [B T] and returns the mean loss."""
    torch = import_module("torch")
    nn, functional = torch.nn, import_module("torch.nn.functional")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide, narrow = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
            self.attention_norm = nn.RMSNorm(cfg.embed_dim)
            self.query = nn.Linear(cfg.embed_dim, wide, bias=False)
            self.key = nn.Linear(cfg.embed_dim, narrow, bias=False)
            self.value = nn.Linear(cfg.embed_dim, narrow, bias=False)
            self.out = nn.Linear(wide, cfg.embed_dim, bias=False)
            self.ffn_norm = nn.RMSNorm(cfg.embed_dim)
            self.gate = nn.Linear(cfg.embed_dim, cfg.ffn_dim, bias=False)
            self.up = nn.Linear(cfg.embed_dim, cfg.ffn_dim, bias=False)
            self.down = nn.Linear(cfg.ffn_dim, cfg.embed_dim, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            normed = self.attention_norm(x)
            q, k, v = (
                layer(normed).view(*x.shape[:2], -1, cfg.head_dim).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            grouped = cfg.num_heads != cfg.num_kv_heads
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=grouped
            )
            x = x + self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))
            normed = self.ffn_norm(x)
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(cfg.vocab_size, cfg.embed_dim)
            self.layers = nn.ModuleList(Layer() for _ in range(cfg.num_layers))
            self.norm = nn.RMSNorm(cfg.embed_dim)
            self.head = nn.Linear(cfg.embed_dim, cfg.vocab_size, bias=False)
            if cfg.ties_embeddings:
                self.head.weight = self.embedding.weight
            pairs = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim
            places = torch.arange(cfg.seq_len, dtype=torch.float32)
            angles = torch.outer(places, 10_000.0**-pairs)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.embedding(tokens).to(torch.bfloat16)
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            logits = self.head(self.norm(x)).float()
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Model()


def measure(cfg: PeerModel) -> PeerTimes:
    """Train on random ids on the first GPU, else the CPU, and time it.

    The rate is one at which the loss stays put: a model that learns its batch by heart
    multiplies ever smaller numbers, which takes less power and lets the clock run faster.
    """
    torch = import_module("torch")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.device(device):
        model = make_model(cfg)
        rows = torch.randint(0, cfg.vocab_size, (NUM_BATCHES, cfg.batch_size, cfg.seq_len))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    compiled, turn = torch.compile(model), itertools.cycle(rows)

    def step() -> Any:
        tokens = next(turn)
        targets = tokens.roll(-1, dims=1)
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    began_s = time.perf_counter()
    loss = step()
    wait()
    compile_s = time.perf_counter() - began_s
    for _ in range(3):
        step()
    wait()
    rounds = []
    for _ in range(cfg.rounds):
        began_s = time.perf_counter()
        for _ in range(cfg.steps_per_round):
            loss = step()
        wait()
        rounds.append((time.perf_counter() - began_s) / cfg.steps_per_round)
    return PeerTimes(
        torch=torch.__version__,
        parameters=sum(weight.numel() for weight in model.parameters()),
        compile_s=compile_s,
        step_s=tuple(rounds),
        peak_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        loss=float(loss),
    )


def main() -> None:
    """Read the model from standard input, time it, write the times to standard output."""
    if find_spec("torch") is None:
        sys.exit(f"{NO_TORCH}: pip install torch, or leave --peer out")
    times = measure(PeerModel(**json.load(sys.stdin)))
    # On a line of its own: what PyTorch prints comes before.
    sys.stdout.write(f"\n{json.dumps(asdict(times))}\n")


if __name__ == "__main__":
    main()
