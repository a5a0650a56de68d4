"""`jaxfound data`: prepare bins of tokens, and look at a batch as the model sees it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxfound.cli.console import ConfigPath, Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.data import Batch, Prepared, Tokenizer

data_app = typer.Typer(
    no_args_is_help=True, help="Turn text into bins of tokens, and look at them."
)


@data_app.command("prepare")
def prepare_command(config: ConfigPath, overrides: Overrides = None) -> None:
    """Read the text of CONFIG into bins and print what came of it, and what was left out and why.

    Training does this by itself; here it can be done once, ahead, and seen.
    """
    from jaxfound.config import load
    from jaxfound.data import load_tokenizer, prepare

    cfg = load(config, overrides or ())
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    prepared = prepare(cfg.data, seq_len=cfg.train.seq_len, tokenizer=tokenizer)
    console = open_console(wraps=True)
    print_counts(prepared, console=console)
    bins, rows = prepared.manifest.train.bins, cfg.train.batch_size
    if bins < rows:
        console.print(
            f"note: a batch of {rows} rows sees all {bins} rows {rows / bins:.3g} times",
            style="yellow",
            highlight=False,
        )
    if tokenizer.vocab_size > cfg.model.vocab_size:
        console.print(
            f"note: {tokenizer.name} has {tokenizer.vocab_size} ids, "
            f"model.vocab_size={cfg.model.vocab_size} is smaller: this model cannot train on them",
            style="yellow",
        )


@data_app.command("collect")
def collect_command(
    folder: Annotated[Path, typer.Argument(help="Top of a tree of text files.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    pattern: Annotated[str, typer.Option(help="Names of the files that are taken.")] = "*.txt",
    most_mb: Annotated[float, typer.Option(help="Most text, MB; 0 = all.", min=0)] = 0,
) -> None:
    """Write a tree of text files, each one document, as a .jsonl file that data.source can name.

    Files are taken in the order of their paths, each text once; the hash says what came of it.
    """
    from jaxfound.data.collect import collect

    found = collect(folder, out, pattern=pattern, most_bytes=int(most_mb * 1e6))
    console = open_console(wraps=True)
    console.print(f"{found.documents:,} documents, {found.num_bytes:,} bytes of text in {out}")
    for reason, count in found.left_out.items():
        console.print(f"left out: {count:,} ({reason})", highlight=False)
    console.print(f"sha256 {found.sha256}", highlight=False, soft_wrap=True)


@data_app.command("show")
def show_command(
    config: ConfigPath,
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(help="Which training step; the first is 0.", min=0)] = 0,
    rows: Annotated[int, typer.Option(help="How many rows of its batch.", min=1)] = 4,
    split: Annotated[Literal["train", "eval"], typer.Option(help="Which documents.")] = "train",
) -> None:
    """Print a training batch as text: each row's segments, their documents, slots and padding.

    Held-out rows are printed in the order in which they are stored.
    """
    from jaxfound.config import load
    from jaxfound.data import BinLoader, DataError, load_tokenizer, prepare

    cfg = load(config, overrides or ())
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    prepared = prepare(cfg.data, seq_len=cfg.train.seq_len, tokenizer=tokenizer)
    bins = prepared.train if split == "train" else prepared.eval
    if bins is None:
        raise DataError("no documents are held out: data.eval_fraction is 0. Use --split train")
    if split == "train":
        size, order = cfg.train.batch_size, cfg.data.order
    else:
        size, order = min(cfg.train.batch_size, bins.num_bins), "sequential"
    loader = BinLoader(bins, batch_size=size, seed=cfg.seed, order=order)
    chosen = slice(0, min(rows, size))
    print_batch(
        loader.batch(step, rows=chosen),
        documents=loader.documents(step, rows=chosen),
        prepared=prepared,
        tokenizer=tokenizer,
        console=open_console(wraps=True),
    )


def print_counts(prepared: "Prepared", *, console: Console) -> None:
    """Print what each split holds, what was left out, and what should be known before training."""
    manifest = prepared.manifest
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    held_out = [] if manifest.eval is None else [("eval", manifest.eval)]
    splits = [("train", manifest.train), *held_out]
    for name, _ in splits:
        table.add_column(name, justify="right")
    for meaning, field in (
        ("documents", "documents"),
        ("pieces", "pieces"),
        (f"rows of {manifest.seq_len}", "bins"),
        ("tokens to predict", "tokens"),
        ("longest document, tokens", "longest_tokens"),
    ):
        table.add_row(meaning, *(f"{getattr(counts, field):,}" for _, counts in splits))
    table.add_row("padding", *(f"{counts.padding_share:.2%}" for _, counts in splits))
    console.print(table)
    for reason, dropped in manifest.dropped.items():
        console.print(
            f"left out: {dropped.count:,} ({reason}), the first at {dropped.first_place}",
            highlight=False,
            soft_wrap=True,
        )
    for remark in prepared.remarks():
        console.print(f"note: {remark}", style="yellow", highlight=False)
    console.print(f"in {prepared.path}", highlight=False, soft_wrap=True)


def print_batch(
    batch: "Batch",
    *,
    documents: tuple[tuple[int, ...], ...],
    prepared: "Prepared",
    tokenizer: "Tokenizer",
    console: Console,
) -> None:
    """Print each row's segments: slots, document, whether it begins and ends there, and text."""
    for row, row_documents in enumerate(documents):
        segments = batch.segment_ids[row]
        console.print(f"row {row}", style="bold")
        for number, document in enumerate(row_documents, 1):
            slots = (segments == number).nonzero()[0]
            first, last = int(slots[0]), int(slots[-1])
            tokens = batch.tokens[row, first : last + 1]
            opened = "⟨bos⟩" if tokens[0] == tokenizer.bos_id else "…"
            closed = "⟨eos⟩" if batch.targets[row, last] == tokenizer.eos_id else "…"
            text = tokenizer.decode(tokens.tolist()).replace("\n", "⏎")
            head = f"  {number}: slots {first}-{last}, {prepared.place(document)}"
            console.print(Text(f"{head}\n     {opened}{text}{closed}"))
        padding = int((segments == 0).sum())
        if padding:
            console.print(f"  padding: {padding} slots", highlight=False)
