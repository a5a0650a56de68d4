"""`jaxfound generate`: continue a prompt with a run's weights."""

from typing import Annotated

import typer

from jaxfound.cli.console import RunPath, open_console


def generate_command(
    run: RunPath,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(help="Longest continuation, tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 = the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Smallest set that reaches this sum.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the newest.")] = None,
) -> None:
    """Continue PROMPT with the weights of RUN, by prefill and cached decoding."""
    from jaxfound.serving import Sampling, load_generator

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    generator = load_generator(run, step=step)
    text = generator.text(prompt, max_tokens=max_tokens, sampling=sampling)
    open_console().print(f"{prompt}{text}", markup=False)
