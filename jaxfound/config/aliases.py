"""Flat keys and flags that users bring from torch launchers, and what each one is here.

They are read at the top of a file and as `key=value`; docs/howto/coming-from-torch-launchers.md
is this table for readers. A word that is not here is an unknown key. `weight_decay` is not: at the
top of a file it is more often an indentation lost, and its refusal names `optimizer.weight_decay`.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

# How a word becomes native keys when it is not the same value under another name
# (config/alias_rules.py).
Rule = Literal["same", "heads", "device_rows", "replicas", "zero", "always_on"]

Value = str | int | float | bool


class Alias(NamedTuple):
    """What a launcher's word is here.

    Attributes:
        key: the native key; empty when there is none.
        values: the launcher's value and ours; empty when they are the same.
        rule: how the value is found when other keys matter too.
    """

    key: str
    values: tuple[tuple[Value, Value], ...] = ()
    rule: Rule = "same"


class Flag(NamedTuple):
    """What a flag of a launcher's command line is here.

    Attributes:
        native: what takes its value where processes are started; empty when nothing does.
        train: why `train` takes no such value, and the way out; empty when it takes it.
    """

    native: str
    train: str = ""


REMAT: tuple[tuple[Value, Value], ...] = (
    (True, "full"),
    (False, "none"),
    ("full", "full"),
    ("selective", "matmul_outputs"),
    ("none", "none"),
)
SCHEDULES: tuple[tuple[Value, Value], ...] = (
    ("cosine", "cosine"),
    ("constant", "constant"),
    ("constant_with_warmup", "constant"),
    ("wsd", "wsd"),
    ("WSD", "wsd"),
    ("warmup_stable_decay", "wsd"),
)
ACTIVATIONS: tuple[tuple[Value, Value], ...] = ((True, "sequence"), (False, "replicated"))
DTYPES: tuple[tuple[Value, Value], ...] = (("bfloat16", "bfloat16"), ("float32", "float32"))

ALIASES: Mapping[str, Alias] = {
    # The model.
    "hidden_size": Alias("model.embed_dim"),
    "num_hidden_layers": Alias("model.num_layers"),
    "num_layers": Alias("model.num_layers"),
    "num_attention_heads": Alias("model.num_heads", rule="heads"),
    "num_key_value_heads": Alias("model.gqa.num_kv_heads"),
    "num_query_groups": Alias("model.gqa.num_kv_heads"),
    "head_dim": Alias("model.gqa.head_dim"),
    "kv_channels": Alias("model.gqa.head_dim"),
    "intermediate_size": Alias("model.ffn_dim"),
    "ffn_hidden_size": Alias("model.ffn_dim"),
    "vocab_size": Alias("model.vocab_size"),
    "max_position_embeddings": Alias("model.max_positions"),
    "rms_norm_eps": Alias("model.norm_eps"),
    "norm_epsilon": Alias("model.norm_eps"),
    "rope_theta": Alias("model.rope.theta"),
    "rotary_base": Alias("model.rope.theta"),
    "tie_word_embeddings": Alias("model.tie_embeddings"),
    "hidden_dropout": Alias("model.dropout"),
    "initializer_range": Alias("model.init_std"),
    "init_method_std": Alias("model.init_std"),
    # The layout.
    "pipeline_parallel_size": Alias("parallel.pipeline"),
    "pipeline_model_parallel_size": Alias("parallel.pipeline"),
    "tensor_parallel_size": Alias("parallel.tensor"),
    "tensor_model_parallel_size": Alias("parallel.tensor"),
    "sequence_parallel": Alias("parallel.activations", ACTIVATIONS),
    "context_parallel_size": Alias("parallel.context"),
    "expert_parallel_size": Alias("parallel.expert"),
    "expert_model_parallel_size": Alias("parallel.expert"),
    "data_parallel_size": Alias("parallel.data", rule="replicas"),
    "zero_stage": Alias("parallel.zero_stage", rule="zero"),
    "activation_checkpointing": Alias("parallel.remat", REMAT),
    "gradient_checkpointing": Alias("parallel.remat", REMAT),
    "recompute_granularity": Alias("parallel.remat", REMAT),
    "use_flash_attn": Alias("", rule="always_on"),
    "use_flash_attention": Alias("", rule="always_on"),
    # The batch.
    "seq_length": Alias("train.seq_len"),
    "sequence_length": Alias("train.seq_len"),
    "max_seq_length": Alias("train.seq_len"),
    "global_batch_size": Alias("train.batch_size"),
    "train_batch_size": Alias("train.batch_size"),
    "gradient_accumulation_steps": Alias("parallel.num_microbatches"),
    "micro_batch_size": Alias("train.batch_size", rule="device_rows"),
    "train_micro_batch_size_per_gpu": Alias("train.batch_size", rule="device_rows"),
    "per_device_train_batch_size": Alias("train.batch_size", rule="device_rows"),
    # The optimizer.
    "lr": Alias("optimizer.learning_rate"),
    "learning_rate": Alias("optimizer.learning_rate"),
    "lr_scheduler_type": Alias("optimizer.schedule", SCHEDULES),
    "lr_decay_style": Alias("optimizer.schedule", SCHEDULES),
    "warmup_steps": Alias("optimizer.warmup_steps"),
    "num_warmup_steps": Alias("optimizer.warmup_steps"),
    "lr_warmup_steps": Alias("optimizer.warmup_steps"),
    "lr_warmup_iters": Alias("optimizer.warmup_steps"),
    "adam_beta1": Alias("optimizer.beta1"),
    "adam_beta2": Alias("optimizer.beta2"),
    "adam_eps": Alias("optimizer.eps"),
    "adam_epsilon": Alias("optimizer.eps"),
    "clip_grad": Alias("optimizer.clip_norm"),
    "gradient_clipping": Alias("optimizer.clip_norm"),
    "max_grad_norm": Alias("optimizer.clip_norm"),
    # The run.
    "train_iters": Alias("train.steps"),
    "max_steps": Alias("train.steps"),
    "log_interval": Alias("train.log_every"),
    "logging_steps": Alias("train.log_every"),
    "eval_interval": Alias("train.eval_every"),
    "eval_steps": Alias("train.eval_every"),
    "save_interval": Alias("checkpoint.every"),
    "save_steps": Alias("checkpoint.every"),
    "save_total_limit": Alias("checkpoint.keep"),
    "bf16": Alias("precision.compute", ((True, "bfloat16"), (False, "float32"))),
    "torch_dtype": Alias("precision.compute", DTYPES),
}

ONE_PROCESS = (
    "`train` is one process that drives every device of its host, so there is no number of "
    "processes to give; `jaxfound launch` takes one where there must be more. parallel.data, "
    "parallel.fsdp and parallel.tensor say what the devices do. Remove it"
)
ONE_HOST = (
    "`train` uses the devices of the host it runs on; `jaxfound launch` takes it and meets the "
    "others: jaxfound launch --nnodes N --node-rank R --coordinator HOST:PORT -- train CONFIG. "
    "Remove it to train on this host"
)
# By the word after the dashes, with underscores; a launcher writes either.
FLAGS: Mapping[str, Flag] = {
    "model_config": Flag("CONFIG"),
    "nproc_per_node": Flag("--nproc-per-node", ONE_PROCESS),
    "nnodes": Flag("--nnodes", ONE_HOST),
    "node_rank": Flag("--node-rank", ONE_HOST),
    "rdzv_endpoint": Flag("--coordinator", ONE_HOST),
    "rdzv_backend": Flag("", ONE_HOST),
    "rdzv_id": Flag("", ONE_HOST),
    "master_addr": Flag("--coordinator", ONE_HOST),
    "master_port": Flag("--coordinator", ONE_HOST),
}


def nested_word(section: str, name: str) -> str:
    """Return what to write for a launcher's word found inside `section`, or nothing."""
    alias = ALIASES.get(name)
    if alias is None or not alias.key:
        return ""
    if alias.key.rpartition(".")[0] == section:
        return f"Did you mean {alias.key}?"
    return f"`{name}` is {alias.key} here, or `{name}` at the top of the file"
