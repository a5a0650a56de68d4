"""What a training run does: data, optimizer, steps, checkpoints."""

from typing import Literal

from jaxfound.config.schema import Section, key


class DataConfig(Section):
    """Where text comes from and how it becomes fixed bins of tokens."""

    source: str | tuple[str, ...] = key(
        "pydocs", "text or jsonl files, or the name of an embedded corpus (pydocs)"
    )
    tokenizer: str = key("byte", "byte, deepseek, or the path of a tokenizer.json", min_length=1)
    text_field: str = key("text", "field of a jsonl record that holds the text", min_length=1)
    on_bad_record: Literal["refuse", "skip"] = key(
        "refuse", "a damaged record stops preparation, or is skipped and counted"
    )
    eval_fraction: float = key(0.05, "share of the documents held out", ge=0, lt=1)
    packing: Literal["packed", "padded"] = key(
        "packed", "several documents to a bin, or one document (or piece of one) to a bin"
    )
    order: Literal["shuffled", "sequential"] = key("shuffled", "order of the bins in an epoch")
    prepared_dir: str = key("runs/.data", "where prepared bins are kept, by content hash")
    loader: Literal["numpy", "grain"] = key("numpy", "grain adds prefetch by worker threads")
    num_prefetch: int = key(2, "batches made ahead of the step that needs them", ge=0)


class OptimizerConfig(Section):
    """The update rule and its schedule."""

    name: Literal["adamw", "muon"] = key(
        "adamw", "update rule; muon orthogonalises matrices and leaves the rest to AdamW"
    )
    learning_rate: float = key(3e-4, "peak learning rate", gt=0)
    schedule: Literal["cosine", "wsd", "constant"] = key(
        "cosine", "after warm-up: cosine to the end, stable then linear decay, or flat"
    )
    warmup_steps: int = key(0, "linear warm-up", unit="steps", ge=0)
    decay_steps: int = key(0, "wsd: length of the final decay", unit="steps", ge=0)
    final_lr_ratio: float = key(0.1, "last learning rate as a share of the peak", ge=0, le=1)
    beta1: float = key(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "decay of the second moment", ge=0, lt=1)
    eps: float = key(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = key(0.1, "decoupled decay of matrices; norms and biases have none", ge=0)
    clip_norm: float = key(1.0, "largest global gradient norm; 0 = no clipping", ge=0)
    muon_momentum: float = key(0.95, "muon: decay of the momentum (Nesterov's)", ge=0, lt=1)
    muon_scale: Literal["match_adamw", "original"] = key(
        "match_adamw",
        "muon: times 0.2 sqrt(max(inputs, outputs)), which moves weights as far as AdamW at the "
        "same rate, or times sqrt(max(1, outputs / inputs))",
    )
    muon_format: Literal["float32", "bfloat16"] = key(
        "float32", "muon: format in which matrices are orthogonalised"
    )


class TrainConfig(Section):
    """Steps, batch, loss and when to look."""

    steps: int = key(..., "optimizer steps in all", unit="steps", ge=1)
    batch_size: int = key(..., "rows of the global batch, all micro-batches together", ge=1)
    seq_len: int = key(..., "tokens of one row", unit="tokens", ge=2)
    documents: Literal["apart", "joined"] = key(
        "apart",
        "what a token sees of its row: earlier tokens of its document, or all earlier ones, which "
        "takes a faster kernel",
    )
    init_from: str = key(
        "", "a run whose newest weights step 0 starts from, e.g. of jaxfound convert; empty = fresh"
    )
    loss_chunk: int = key(
        512, "tokens of a row whose logits exist at one time; 0 = whole rows", unit="tokens", ge=0
    )
    z_loss_weight: float = key(0.0, "weight of log(Z)^2", ge=0)
    mtp_loss_weight: float = key(0.3, "weight of the mean loss of the extra predictions", ge=0)
    non_finite: Literal["skip", "stop", "demote"] = key(
        "stop",
        "a step with NaN or infinity is skipped, or ends the run, or takes the layers whose fp8 it "
        "comes from to precision.compute and ends the run if there are none; the batch is saved",
    )
    max_skipped: int = key(10, "skipped steps in a row that end the run", unit="steps", ge=1)
    log_every: int = key(10, "steps between records in metrics.jsonl", unit="steps", ge=1)
    eval_every: int = key(100, "steps between evaluations; 0 = at the end only", unit="steps", ge=0)
    eval_batches: int = key(8, "held-out batches of one evaluation; 0 = none", ge=0)


class CheckpointConfig(Section):
    """When state is saved and how much of it is kept."""

    every: int = key(200, "steps between checkpoints; 0 = at the end only", unit="steps", ge=0)
    keep: int = key(2, "newest committed checkpoints that are kept; 0 = keep all", ge=0)
    mode: Literal["async", "sync"] = key("async", "write while training goes on, or wait")
    local_dir: str = key(
        "",
        "folder on a fast disk of each host, the same path on all: saves go there first, and to "
        "the run's folder in the background; empty = straight to the run's folder",
    )
    keep_local: int = key(2, "newest checkpoints that are kept in local_dir", ge=2)
    upload_mbps: float = key(
        0.0, "most that a host copies from local_dir to the run's folder; 0 = no limit",
        unit="MB/s", ge=0,
    )  # fmt: skip
    remote: str = key(
        "", "URL of an object store that committed checkpoints go on to, e.g. s3://bucket/run"
    )
    verify: Literal["full", "size"] = key(
        "full", "before a restore every file is summed, or only its size is looked at"
    )
    upload_wait_s: float = key(
        3600.0, "how long the end of a run waits for the last upload", unit="seconds", ge=0
    )


class WatchConfig(Section):
    """When a job of several processes, or one that an agent started, is said to hang or limp."""

    hang_s: float = key(
        300.0,
        "least time without progress that is a hang, and ten usual steps; 0 = never",
        unit="seconds",
        ge=0,
    )
    slow_s: float = key(
        3600.0,
        "the same while preparing, compiling, restoring, saving and evaluating",
        unit="seconds",
        gt=0,
    )
    straggler_every: int = key(
        50, "steps between comparisons of the hosts; 0 = none", unit="steps", ge=0
    )
