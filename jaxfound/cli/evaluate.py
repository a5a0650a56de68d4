"""`jaxfound evaluate`: the loss of a run on a text, and what another precision changes."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxfound.cli.console import Overrides, open_console

if TYPE_CHECKING:
    from jaxfound.config.precision import Format, PrecisionConfig
    from jaxfound.config.run import RunConfig
    from jaxfound.resources.run_directory import RunDirectory
    from jaxfound.training.gap import Comparison, Gap, Score, Verdict

FORMAT_VERSION = 1


def evaluate_command(
    model: Annotated[
        Path, typer.Argument(help="A run's folder, trained or converted.", metavar="MODEL")
    ],
    data: Annotated[str, typer.Option(help="Text: .txt, .jsonl, a folder, pydocs.")],
    overrides: Overrides = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, fp8, fp8_weights, or bfloat16,PATTERN=fp8,…; the run's own."
        ),
    ] = None,
    versus: Annotated[
        str | None, typer.Option(help="A second one, compared on the same tokens.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Read whole documents until they hold this many.", min=1)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Longest piece of a document; train.seq_len.", min=2)
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(help="Exit 1 unless --versus is shown to be within this, nats a token."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.", metavar="FILE")] = None,
) -> None:
    """Measure the loss of MODEL on a text, and what --versus does to it and to the predictions.

    A gate before a precision is switched: --max-drop 0.01 exits with 1 unless the whole 95 %
    interval of the rise in loss is within it.
    """
    from jaxfound.config.schema import ConfigError
    from jaxfound.training.compare import compare

    if versus is None and max_drop is not None:
        raise ConfigError("--max-drop compares two precisions: name the second with --versus")
    a = None if precision is None else precision_of(precision, option="--precision")
    b = None if versus is None else precision_of(versus, option="--versus")
    there, cfg = config_of(model, overrides or [], data=data, seq_len=seq_len)
    found = compare(
        cfg, there, precision=a or cfg.precision, versus=b, step=step, min_tokens=tokens
    )
    verdict = None if found.gap is None or max_drop is None else found.gap.verdict(max_drop)
    console = open_console()
    show(found, console=console)
    if out is not None:
        record = {"format_version": FORMAT_VERSION, "model": str(model), "data": data}
        gate = {"max_drop": max_drop, "verdict": verdict}
        write_json({**record, **asdict(found), "gate": gate if verdict else None}, out)
        console.print(f"written to {out}", markup=False)
    if found.gap is not None and max_drop is not None and verdict is not None:
        console.print(gate_line(found.gap, max_drop, verdict=verdict), markup=False)
    if verdict not in (None, "passed"):
        raise typer.Exit(1)


def precision_of(text: str, *, option: str) -> "PrecisionConfig":
    """Return the precision that an option names.

    Args:
        text: `FORMAT` for every operation, or a list `FORMAT,PATTERN=FORMAT,…`: the first pattern
            that matches an operation decides, and FORMAT alone is for the rest. In fp8 and
            fp8_weights for the rest activations between products are bfloat16.
        option: what messages call it.

    Raises:
        ConfigError: names the word that is no format.
    """
    from jaxfound.config.nearest import nearest_word
    from jaxfound.config.precision import Format, PrecisionConfig, PrecisionRule
    from jaxfound.config.schema import ConfigError

    first, *others = (part.strip() for part in text.split(","))
    rules = [("*", first.removeprefix("compute="))]
    for part in others:
        pattern, _, word = part.rpartition("=")
        if not pattern:
            raise ConfigError(
                f"{option}={text}: {part!r} is no rule. A list is FORMAT,PATTERN=FORMAT,…, e.g. "
                "bfloat16,layers.ffn.*=fp8"
            )
        rules.insert(-1, (pattern, word))
    for _, word in rules:
        if word not in get_args(Format):
            raise ConfigError(
                f"{option}={text}: {word!r} is no format{nearest_word(word, get_args(Format))}"
                f" There are {', '.join(get_args(Format))}"
            )
    rest = rules[-1][1]
    made = [PrecisionRule(pattern=p, format=cast("Format", word)) for p, word in rules]
    if rest in ("float32", "bfloat16"):
        return PrecisionConfig(compute=rest, rules=tuple(made[:-1]))
    return PrecisionConfig(compute="bfloat16", rules=tuple(made))


def config_of(
    model: Path, overrides: list[str], *, data: str, seq_len: int | None
) -> "tuple[RunDirectory, RunConfig]":
    """Return a run's folder and its config with another text and, if asked, another length.

    Raises:
        CheckpointError: if there is no run.
        ConfigError: if an override is wrong, or the length is beyond model.max_positions.
    """
    from jaxfound.config.load import load
    from jaxfound.resources.checkpoint import CheckpointError
    from jaxfound.resources.run_directory import RunDirectory

    there = RunDirectory(model)
    if not there.config.exists():
        raise CheckpointError(
            f"{model} is not a run: it has no {there.config.name}. Give a folder that "
            "`jaxfound train` or `jaxfound convert` made"
        )
    asked = [] if seq_len is None else [f"train.seq_len={seq_len}"]
    cfg = load(there.config, [*overrides, *asked])
    return there, cfg.model_copy(update={"data": cfg.data.model_copy(update={"source": data})})


def show(found: "Comparison", *, console: Console) -> None:
    """Print what was measured."""
    console.print(
        f"step {found.step}: {found.num_tokens:,} tokens of {found.num_documents:,} documents, "
        f"{found.num_bytes:,} bytes, in {found.num_pieces:,} pieces of at most {found.seq_len:,} "
        f"tokens, on {found.device}",
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", "precision"):
        table.add_column(name)
    for name in ("loss, nats a token", "perplexity", "bits a byte"):
        table.add_column(name, justify="right")
    for letter, score in (("a", found.a), ("b", found.b)):
        if score is not None:
            table.add_row(letter, *cells(score))
    console.print(table)
    if found.gap is not None:
        show_gap(found.gap, num_tokens=found.num_tokens, console=console)


def cells(score: "Score") -> tuple[Text, ...]:
    """Return a row of the table."""
    numbers = f"{score.loss:.5f}", f"{score.perplexity:.5g}", f"{score.bits_per_byte:.5f}"
    # Not as markup, in which the pattern `[ab]*` would be a style.
    return tuple(Text(cell) for cell in (score.precision, *numbers))


def show_gap(gap: "Gap", *, num_tokens: int, console: Console) -> None:
    """Print how far b is from a."""
    from jaxfound.training.gap import MIN_DOCUMENTS

    few = gap.num_units < MIN_DOCUMENTS
    lines = [
        f"b - a: {gap.loss_increase:+.2e} nats a token, 95 % interval {gap.low:+.2e} to "
        f"{gap.high:+.2e} (bootstrap over {gap.num_units:,} {gap.unit})",
        *(["note: of so few the interval is too narrow; give more text"] if few else []),
        f"greedy agreement: {gap.agreement:.3%}, {gap.num_flips:,} of {num_tokens:,} tokens flip",
        f"KL(b || a), nats a token: mean {gap.mean_kl:.2e}, largest {gap.max_kl:.2e}",
    ]
    if gap.num_flips:
        shares = ", ".join(
            f"{each.count / gap.num_flips:.1%} below {each.below:g}" for each in gap.flips_by_margin
        )
        lines.append(
            f"a's margin at the flips, nats: {shares}; the largest {gap.max_flip_margin:.2e}"
        )
    for line in lines:
        console.print(line, markup=False)


def gate_line(gap: "Gap", max_drop: float, *, verdict: "Verdict") -> str:
    """Return the verdict as a sentence."""
    if verdict == "passed":
        return f"gate passed: the interval ends at {gap.high:+.2e}, within {max_drop:g}"
    if verdict == "worse":
        return f"gate FAILED: the interval begins at {gap.low:+.2e}, beyond {max_drop:g}"
    if math.isnan(gap.high):
        return "gate FAILED: a loss is not a number"
    return (
        f"gate FAILED: the interval ends at {gap.high:+.2e}, beyond {max_drop:g}, and begins at "
        f"{gap.low:+.2e}: more text may show that it is within"
    )


def write_json(record: dict[str, object], path: Path) -> None:
    """Write the record; NaN and infinity, which JSON does not have, become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(finite(record), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", "utf-8")


def finite(value: object) -> object:
    """Return plain data with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
