"""`jaxfound bench serve`: what clients of an engine or of a server see under load."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.bench_kernels import COMMIT_VARIABLE, TABLE_WIDTH, commit_of
from jaxfound.cli.console import Overrides, open_console
from jaxfound.cli.evaluate import write_json
from jaxfound.cli.serve import KEY_VARIABLE, MODEL_HELP, Step, TokenizerName, keep_compiled

if TYPE_CHECKING:
    from jaxfound.serving.load_plan import Workload
    from jaxfound.serving.load_report import LoadReport
    from jaxfound.serving.measure import Measured

FORMAT_VERSION = 1
HEADER = (
    *("load", "requests", "failed", "requests/s", "tokens/s", "first token p50", "p90", "p99"),
    *("per token p50", "p90", "p99", "queue p50", "p99", "good", "good/s"),
)
LENGTHS = "128, 64-256 or lognormal:MEDIAN:SIGMA."

LoadModel = Annotated[
    Path | None, typer.Argument(help=f"{MODEL_HELP} Not with --url.", metavar="[MODEL]")
]
Url = Annotated[str | None, typer.Option(help="A running server, in place of MODEL.")]
Clients = Annotated[str, typer.Option(help="Closed loops of so many clients.", metavar="N,…")]
Rates = Annotated[str, typer.Option(help="Poisson arrivals, requests a second.", metavar="R,…")]
Shared = Annotated[int, typer.Option(help="Tokens that all prompts begin with.", min=0)]
FirstLimit = Annotated[float, typer.Option(help="A good request has its first token by then.")]
TokenLimit = Annotated[float, typer.Option(help="It takes at most this per token after that.")]
TimeLimit = Annotated[float, typer.Option(help="Of each load.", min=1)]
ApiKey = Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="Of --url.")]


def bench_serve_command(
    model: LoadModel = None,
    overrides: Overrides = None,
    url: Url = None,
    concurrency: Clients = "",
    rate: Rates = "",
    requests: Annotated[int, typer.Option(help="Of each load.", min=1)] = 64,
    prompt_tokens: Annotated[str, typer.Option(help=LENGTHS)] = "128",
    output_tokens: Annotated[str, typer.Option(help=LENGTHS)] = "64",
    shared_prefix: Shared = 0,
    first_limit_ms: FirstLimit = math.inf,
    token_limit_ms: TokenLimit = math.inf,
    time_limit_s: TimeLimit = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and ids.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file, written after every load.")] = None,
    png: Annotated[Path | None, typer.Option(help="PNG file to draw.")] = None,
    api_key: ApiKey = None,
    step: Step = None,
    tokenizer: TokenizerName = None,
    commit: Annotated[str, typer.Option(help=f"In place of git's; or {COMMIT_VARIABLE}.")] = "",
) -> None:
    """Send loads to MODEL's engine in this process, or to a server, and print what clients see.

    Times to the first token count from when a request was to arrive. Draws are greedy, and eos
    does not end a continuation. Exits with 1 if a request failed.
    """
    from jaxfound.serving.load_report import Limits
    from jaxfound.serving.measure import measure_loads

    given = (requests, prompt_tokens, output_tokens, shared_prefix, seed)
    workloads = workloads_of(concurrency, rate, given)
    limits = Limits(first_limit_ms / 1e3, token_limit_ms / 1e3)
    found: list[LoadReport] = []
    with target_of(model, overrides or (), url, api_key, step, tokenizer) as measured:
        for report in measure_loads(measured, workloads, limits=limits, limit_s=time_limit_s):
            found.append(report)
            open_console().print(progress(report), markup=False)
            if out is not None:
                write_json(record(found, workloads, measured, commit=commit), out)
    name = str(measured.facts["model"])
    print_table(found, title=f"{name}: prompts {prompt_tokens}, outputs {output_tokens} tokens")
    if out is not None:
        open_console().print(f"written to {out}", markup=False)
    if png is not None:
        from jaxfound.cli.pages.load_chart import write_chart

        write_chart(found, png, title=name)
        open_console().print(f"drawn to {png}", markup=False)
    if any(report.failures for report in found):
        raise typer.Exit(1)


def workloads_of(
    concurrency: str, rate: str, given: tuple[int, str, str, int, int]
) -> "list[Workload]":
    """Return a load for each number of clients, then one for each rate.

    Args:
        concurrency: numbers with commas between.
        rate: the same.
        given: requests of each, lengths of prompts, of outputs, shared tokens, seed.

    Raises:
        ConfigError: a number cannot be read, or there is none.
    """
    from jaxfound.config.schema import ConfigError
    from jaxfound.serving.load_plan import Lengths, Workload

    try:
        clients = [int(word) for word in concurrency.split(",") if word.strip()]
        rates = [float(word) for word in rate.split(",") if word.strip()]
    except ValueError as error:
        raise ConfigError(f"--concurrency and --rate take numbers: {error}") from error
    if not all(n > 0 and math.isfinite(n) for n in (*clients, *rates)):
        raise ConfigError(f"clients {clients} and rates {rates} must be above 0, and finite")
    if not clients and not rates:
        raise ConfigError("say what load: --concurrency 1,4,16, or --rate 2,8, or both")
    num, prompt, output, shared, seed = given
    loads: list[tuple[int | None, float | None]] = [(n, None) for n in clients]
    return [
        Workload(num, Lengths.parse(prompt), Lengths.parse(output), n, r, shared, seed)
        for n, r in [*loads, *((None, r) for r in rates)]
    ]


@contextmanager
def target_of(
    model: Path | None,
    overrides: Sequence[str],
    url: str | None,
    api_key: str | None,
    step: int | None,
    tokenizer: str | None,
) -> "Iterator[Measured]":
    """Open what is loaded: the engine of MODEL in this process, or a server at an address."""
    from jaxfound.cli.serve import need_packages
    from jaxfound.config.schema import ConfigError

    need_packages("starlette", "uvicorn", "prometheus_client")
    from jaxfound.serving.measure import engine_target, http_target

    if model is None and url is not None:
        yield http_target(url, api_key=api_key)
        return
    if model is None or url is not None:
        raise ConfigError("name either MODEL, whose engine runs in this process, or --url")
    keep_compiled(model)
    with engine_target(model, overrides, step=step, tokenizer=tokenizer) as measured:
        yield measured


def progress(report: "LoadReport") -> str:
    """Return one line about a load that is done."""
    told = ", ".join(f"{count} x {reason}" for reason, count in report.failures.items())
    failed = f"; FAILED {told}" if told else ""
    return (
        f"{report.name}: {report.num_requests} requests in {report.duration_s:.1f} s, "
        f"{report.token_rate:,.1f} tokens/s{failed}"
    )


def record(
    found: "Sequence[LoadReport]",
    workloads: "Sequence[Workload]",
    measured: "Measured",
    *,
    commit: str,
) -> dict[str, object]:
    """Return the JSON of what was measured so far, with where and how."""
    from dataclasses import asdict

    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(commit),
        **measured.facts,
        "loads": [
            {"workload": asdict(workload), "found": report.as_dict()}
            for workload, report in zip(workloads, found, strict=False)
        ],
    }


def print_table(found: "Sequence[LoadReport]", *, title: str) -> None:
    """Print a line for each load; times are milliseconds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in HEADER:
        left = name == "load"
        table.add_column(
            name if left else name.replace(" ", "\n"), justify="left" if left else "right"
        )
    for report in found:
        table.add_row(*cells(report))
    console = open_console(wraps=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    console.print(table)
    open_console().print(
        "times in ms; first token: from when the request was to arrive; per token: mean of a "
        "request after its first; queue: until its first step; good: within the limits",
        markup=False,
    )


def cells(report: "LoadReport") -> list[str]:
    """Return a load as text; `-` where nothing was measured."""

    def ms(*seconds: float) -> list[str]:
        return ["-" if math.isnan(s) else f"{1e3 * s:,.1f}" for s in seconds]

    first, token, queue = report.first_token_s, report.per_token_s, report.queue_s
    return [
        report.name,
        str(report.num_requests),
        str(sum(report.failures.values())),
        f"{report.request_rate:.2f}",
        f"{report.token_rate:,.1f}",
        *ms(first.p50, first.p90, first.p99, token.p50, token.p90, token.p99),
        *ms(queue.p50, queue.p99),
        f"{report.good_share:.0%}",
        f"{report.goodput:.2f}",
    ]
