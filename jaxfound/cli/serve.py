"""`jaxfound serve`: an HTTP server that speaks OpenAI's API, over weights in a folder."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import Overrides, open_console
from jaxfound.cli.serve_gate import pass_gate, switched

if TYPE_CHECKING:
    from jaxfound.serving.run import Serving

KEY_VARIABLE = "JAXFOUND_API_KEY"
MODEL_HELP = "A run's folder; or a published folder or .gguf file."

ModelPath = Annotated[Path, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
Step = Annotated[int | None, typer.Option(help="Which checkpoint of a run; the newest.")]
TokenizerName = Annotated[
    str | None, typer.Option(help="In place of the model's: byte, a name, a tokenizer.json.")
]


Host = Annotated[str, typer.Option(help="0.0.0.0 = every address of it.")]
Port = Annotated[int, typer.Option(help="0 = any that is free.", min=0, max=65535)]
Name = Annotated[str | None, typer.Option(help="Of the model, in requests; MODEL's.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="Asked for as a Bearer token; a variable is in no list of processes.",
    ),
]
Template = Annotated[
    Path | None, typer.Option(help="A jinja file for chats, in place of the tokenizer's.")
]
Shadows = Annotated[
    list[str] | None,
    typer.Option(help="Run it beside the one that serves, and compare.", metavar="OP=BACKEND"),
]
Backends = Annotated[
    list[str] | None, typer.Option(help="Let it serve alone.", metavar="OP=BACKEND")
]
Gate = Annotated[
    str, typer.Option(help="Text on which another precision must pass.", metavar="DATA")
]
MaxDrop = Annotated[float, typer.Option(help="Most that another precision may lose, nats a token.")]
Plan = Annotated[
    str | None, typer.Option(help="Serve nothing; say what such cards hold.", metavar="CARD")
]
PlanLoad = Annotated[
    str, typer.Option(help="With --plan: requests at once, tokens of each.", metavar="NxP+M")
]


def serve_command(
    model: ModelPath,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    api_key: ApiKey = None,
    template: Template = None,
    step: Step = None,
    tokenizer: TokenizerName = None,
    shadow: Shadows = None,
    backend: Backends = None,
    gate: Gate = "pydocs",
    max_drop: MaxDrop = 0.01,
    plan: Plan = None,
    load: PlanLoad = "64x1024+256",
) -> None:
    """Serve MODEL to clients of OpenAI's API.

    Sizes are keys of the config's section `serve`, e.g. serve.max_rows=8. SIGTERM or Ctrl-C lets
    running requests end (serve.drain_timeout_s) and leaves with 0. A precision other than MODEL's
    own is measured first, and refused if it loses more than --max-drop. `--plan h200` says what a
    model (also a preset or a YAML file) would need; no weights and no device are read.
    """
    if plan is not None:
        show_plan(model, overrides or (), card=plan, load=load)
        return
    need_packages("starlette", "uvicorn", "prometheus_client")
    from jaxfound.serving.rollout import Rollout
    from jaxfound.serving.run import Address, serve

    rollout = Rollout.parse(shadow or (), backend or ())
    address = Address(host, port, name or served_name(model), api_key, template)
    keep_compiled(model)
    precision = switched(model, overrides or ())
    if precision is not None:
        pass_gate(model, precision, data=gate, max_drop=max_drop, step=step)
    shadows = serve(
        model,
        overrides or (),
        address=address,
        on_ready=lambda there: say(facts(there)),
        step=step,
        tokenizer=tokenizer,
        rollout=rollout,
    )
    say([each.verdict for each in shadows])
    say(["stopped: every request that was taken has been answered or told"])


def say(lines: Sequence[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        open_console().print(line, markup=False)


def show_plan(model: Path, overrides: Sequence[str], *, card: str, load: str) -> None:
    """Print how many requests cards hold, and how many cards a load needs.

    Raises:
        ConfigError: the card or the load cannot be read, or it does not fit.
    """
    from jaxfound.config.schema import ConfigError
    from jaxfound.resources.topology_text import kind_of
    from jaxfound.serving.capacity import Load, capacity_lines, plan_capacity
    from jaxfound.serving.open_model import planned_config

    numbers = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", load)
    if numbers is None:
        raise ConfigError(f"--load {load}: write requests x prompt + new tokens, as 64x1024+256")
    cfg = planned_config(model, overrides)
    capacity = plan_capacity(
        cfg.model,
        cfg.serve,
        hardware=kind_of(card),
        load=Load(*map(int, numbers.groups())),
        precision=cfg.precision,
    )
    say(list(capacity_lines(capacity)))


def facts(there: "Serving") -> list[str]:
    """Return what is said when the server answers."""
    tokens = there.num_pages * there.page_size
    return [
        f"{there.name} on {there.num_devices} x {there.device}: weights in {there.open_s:.1f} s, "
        f"programs in {there.compile_s:.1f} s",
        f"up to {there.max_rows} requests at once, {there.max_length:,} tokens each; "
        f"{there.num_pages:,} pages of {there.page_size}, {tokens:,} tokens, in the cache",
        f"listening on {there.url}",
        f"try: curl {there.url}/v1/completions -d "
        '\'{"prompt": "The for statement", "max_tokens": 32}\'',
    ]


def served_name(model: Path) -> str:
    """Return what requests call a model that was given no name."""
    return model.resolve().stem if model.suffix == ".gguf" else model.resolve().name


def keep_compiled(model: Path) -> None:
    """Keep compiled programs beside a run, or in the user's cache for published weights."""
    from jaxfound.resources.platform import use_compile_cache
    from jaxfound.resources.run_directory import RunDirectory

    if RunDirectory(model).config.exists():
        use_compile_cache(model.parent / ".cache" / "compiled")
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    use_compile_cache(Path(home) / "jaxfound" / "compiled")


def need_packages(*modules: str) -> None:
    """Refuse to go on without the packages of the extra `serve`; ConfigError names the missing."""
    from importlib.util import find_spec

    from jaxfound.config.schema import ConfigError

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"serving needs {', '.join(missing)}, which is not installed: pip install "
            "'jaxfound[serve]'"
        )
