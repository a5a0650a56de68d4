"""`jaxfound generate`: continue a prompt, or answer a message, with a run's weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxfound.cli.console import RunPath

if TYPE_CHECKING:
    from jaxfound.data import Tokenizer


def generate_command(
    run: RunPath,
    prompt: Annotated[str, typer.Argument(help="Text to continue; with --chat, a message.")],
    max_tokens: Annotated[int, typer.Option(help="Longest continuation, tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 = the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Smallest set that reaches this sum.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the newest.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="In place of the run's: byte, a name, a tokenizer.json.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer PROMPT as a message, by the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: what comes before it.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="With --chat: a jinja file in place of the tokenizer's.")
    ] = None,
) -> None:
    """Continue PROMPT with the weights of RUN; the text appears as it is made."""
    from jaxfound.config.schema import ConfigError
    from jaxfound.serving import Sampling, load_generator

    if not chat and (system is not None or template is not None):
        raise ConfigError("--system and --template belong to a chat: add --chat")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    generator = load_generator(run, step=step, tokenizer=tokenizer)
    asked: str | list[int] = prompt
    if chat:
        asked = chat_prompt(generator.tokenizer, prompt, system=system, template=template)
    pieces = generator.stream(asked, max_tokens=max_tokens, sampling=sampling)
    # The first piece before the prompt: what cannot be done is said with nothing printed. Plain
    # writes: a table's console would fold the text and read `:name:` in it as a picture.
    first = next(pieces, "")
    typer.echo(first if chat else prompt + first, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def chat_prompt(
    tokenizer: "Tokenizer", message: str, *, system: str | None, template: Path | None
) -> list[int]:
    """Return the ids of a chat of one message, after the system's if there is one.

    Raises:
        DataError: if there is no template, it cannot be read, or it refuses the messages.
    """
    from jaxfound.data.chat import chat_ids, read_template

    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": message})
    own = None if template is None else read_template(tokenizer, template)
    return chat_ids(tokenizer, messages, template=own).tolist()
