"""Bodies of OpenAI's completions and chats, checked field by field, as requests of the engine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jaxfound.serving.api_error import ApiError, bad
from jaxfound.serving.fields import Fields
from jaxfound.serving.json_body import read_object
from jaxfound.serving.prompt_fields import check_length, read_messages, read_prompts
from jaxfound.serving.request import Request
from jaxfound.serving.sampler import MAX_TOP
from jaxfound.serving.sampling import Sampling
from jaxfound.serving.sampling_fields import read_sampling
from jaxfound.serving.served import ServedModel

type Kind = Literal["completion", "chat"]

DEFAULT_TOKENS = 16
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_LETTERS = 512
# What OpenAI's own servers allow for completions; chats may have MAX_TOP.
MAX_LOGPROBS = 5

# Fields that change nothing here, of any type.
HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
# Fields that this server does not serve, and their values that ask for nothing.
UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True)
class Asked:
    """A checked body.

    Attributes:
        id: of the answer.
        kind: which of OpenAI's two forms it has.
        requests: of the engine: n for the first prompt, then n for the next one …
        echoes: for each request, the prompt's text if it is part of the answer.
        num_choices: n, continuations of each prompt.
        stream: whether the answer comes in pieces.
        usage_chunk: whether a stream ends with the counts of tokens.
    """

    id: str
    kind: Kind
    requests: tuple[Request, ...]
    echoes: tuple[str, ...]
    num_choices: int
    stream: bool
    usage_chunk: bool


@dataclass(frozen=True)
class Wanted:
    """The fields that both kinds share."""

    sampling: Sampling
    max_tokens: int | None
    num_choices: int
    stop: tuple[str, ...]
    ignore_eos: bool
    priority: int
    stream: bool
    usage_chunk: bool


def read_completion(raw: bytes, served: ServedModel) -> Asked:
    """Return what the body of `/v1/completions` asks for.

    Raises:
        ApiError: 400 names the field that is wrong; 404 for another model.
    """
    fields = Fields(read_object(raw))
    check_model(fields, served)
    prompts = read_prompts(fields.take("prompt"), served)
    wanted = read_wanted(fields, served, max_tokens=fields.integer("max_tokens", None, low=1))
    best_of = fields.integer("best_of", None, low=1, high=MAX_CHOICES)
    if best_of not in (None, wanted.num_choices):
        raise bad(
            f"best_of={best_of} with n={wanted.num_choices}: every choice is returned, so best_of "
            "must equal n",
            param="best_of",
        )
    logprobs = fields.integer("logprobs", None, low=0, high=MAX_LOGPROBS)
    echo = fields.flag("echo")
    fields.check_all_read()
    texts = [_text_of(prompt, given, served) if echo else "" for prompt, given in prompts]
    return _asked(
        "completion",
        [prompt for prompt, _ in prompts],
        texts,
        wanted,
        served,
        default_tokens=DEFAULT_TOKENS,
        logprobs=logprobs,
        prompt_logprobs=echo and logprobs is not None,
    )


def read_chat(raw: bytes, served: ServedModel) -> Asked:
    """Return what the body of `/v1/chat/completions` asks for.

    Raises:
        ApiError: as `read_completion`; 400 too where there is no template, or it refuses.
    """
    fields = Fields(read_object(raw))
    check_model(fields, served)
    prompt = read_messages(fields.take("messages"), served)
    most = fields.integer("max_completion_tokens", None, low=1)
    older = fields.integer("max_tokens", None, low=1)
    if most is not None and older not in (None, most):
        raise bad(
            f"max_completion_tokens={most} and max_tokens={older} differ: give one of them",
            param="max_tokens",
        )
    wanted = read_wanted(fields, served, max_tokens=older if most is None else most)
    shows = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, low=0, high=MAX_TOP)
    if top is not None and not shows:
        raise bad(f"top_logprobs={top} needs logprobs=true", param="top_logprobs")
    fields.check_all_read()
    return _asked(
        "chat",
        [prompt],
        [""],
        wanted,
        served,
        default_tokens=max(served.max_length - len(prompt), 1),
        logprobs=(top or 0) if shows else None,
        prompt_logprobs=False,
    )


def check_model(fields: Fields, served: ServedModel) -> None:
    """A body that names a model names the one that is served; ApiError 404 otherwise."""
    name = fields.text("model", served.name)
    if name != served.name:
        raise ApiError(
            404,
            f"there is no model {name!r} here; this server has {served.name!r}",
            param="model",
            code="model_not_found",
        )


def read_wanted(fields: Fields, served: ServedModel, *, max_tokens: int | None) -> Wanted:
    """Return the fields that completions and chats share; ApiError 400 names one that is wrong."""
    for name in HARMLESS:
        fields.take(name)
    for name, neutral in UNSERVED.items():
        value = fields.take(name)
        if value is not None and value not in neutral:
            raise bad(
                f"{name} is not supported by this server: leave it out",
                param=name,
                code="unsupported_parameter",
            )
    stream = fields.flag("stream")
    options = fields.inner("stream_options")
    if options is not None and not stream:
        raise bad("stream_options needs stream=true", param="stream_options")
    usage_chunk = options is not None and options.flag("include_usage")
    if options is not None:
        options.flag("include_obfuscation")
        options.check_all_read()
    return Wanted(
        sampling=read_sampling(fields, vocab_size=served.tokenizer.vocab_size),
        max_tokens=max_tokens,
        num_choices=fields.integer("n", 1, low=1, high=MAX_CHOICES) or 1,
        stop=read_stop(fields),
        ignore_eos=fields.flag("ignore_eos"),
        priority=fields.integer("priority", 0, low=-1000, high=1000) or 0,
        stream=stream,
        usage_chunk=usage_chunk,
    )


def read_stop(fields: Fields) -> tuple[str, ...]:
    """Return the stop texts: one, a list, or none."""
    value = fields.take("stop")
    rule = f"a text or a list of at most {MAX_STOPS} texts"
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise fields.wrong("stop", value, rule, wrong_type=True)
    if len(texts) > MAX_STOPS:
        raise fields.wrong("stop", value, f"{rule}; it holds {len(texts)}")
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_LETTERS:
            raise bad(
                f"a stop text has {len(text)} characters; it must have 1 to {MAX_STOP_LETTERS}",
                param="stop",
            )
    return tuple(dict.fromkeys(texts))


def _text_of(prompt: tuple[int, ...], given: str | None, served: ServedModel) -> str:
    return served.tokenizer.decode(prompt) if given is None else given


def _asked(
    kind: Kind,
    prompts: list[tuple[int, ...]],
    texts: list[str],
    wanted: Wanted,
    served: ServedModel,
    *,
    default_tokens: int,
    logprobs: int | None,
    prompt_logprobs: bool,
) -> Asked:
    """Return the requests of every prompt and choice, once they are known to fit."""
    n = wanted.num_choices
    if len(prompts) * n > served.max_sequences:
        raise bad(
            f"{len(prompts)} prompts x n={n} are {len(prompts) * n} continuations; one request "
            f"may have {served.max_sequences}: send several requests",
            param="prompt",
        )
    max_tokens = default_tokens if wanted.max_tokens is None else wanted.max_tokens
    for prompt in prompts:
        check_length(len(prompt), max_tokens, served)
    name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{os.urandom(12).hex()}"
    seed = wanted.sampling.seed
    # Every choice draws differently, and the same in the next request of that seed.
    seeds = [None if seed is None else seed + i for i in range(n)]
    requests = [
        Request(
            id=f"{name}-{i * n + j}",
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=replace(wanted.sampling, seed=seeds[j]),
            stop=wanted.stop,
            ignore_eos=wanted.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            priority=wanted.priority,
        )
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    echoes = tuple(text for text in texts for _ in range(n))
    return Asked(name, kind, tuple(requests), echoes, n, wanted.stream, wanted.usage_chunk)
