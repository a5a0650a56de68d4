"""Chat templates: jinja2 text that turns messages into one string, as the Hub's models expect."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from jaxfound.data.errors import DataError

if TYPE_CHECKING:
    import jinja2

# `{"role": "user", "content": "…"}`, and whatever else a template reads.
Message = Mapping[str, object]


class ChatTemplate:
    """One template, run in jinja2's sandbox: it sees its variables and nothing else.

    A template finds `messages`, `tools`, `add_generation_prompt`, the special tokens by name
    (`bos_token` …, undefined where there is none), `raise_exception(text)`, `strftime_now(format)`,
    the filter `tojson` (no HTML escapes), `break` and `continue`, and the block `generation`.
    Newlines after a block and blanks before one are removed.

    Args:
        text: the template.
        place: where it stands, for messages.
        tokens: special tokens by the names that the template uses.
    """

    def __init__(self, text: str, *, place: str, tokens: Mapping[str, str]) -> None:
        self.text = text
        self.place = place
        self.tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the conversation as the template writes it.

        Args:
            messages: one after the other, each with a `role`.
            add_generation_prompt: end where the model's answer begins.
            tools: what the model may call, for templates that know tools.
            variables: more of them, e.g. `enable_thinking`.

        Raises:
            DataError: if the template refuses the messages (in its own words), fails on them, or
                is no jinja2, or `jinja2` is not installed.
        """
        check_messages(messages)
        template = self._compiled
        import jinja2  # it is there: the template is compiled

        try:
            return template.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
                **{**self.tokens, **(variables or {})},
            )
        except _Refusal as err:
            raise DataError(f"the chat template in {self.place} refuses: {err}") from err
        # What an expression of a template can raise; it is data, and may be wrong in any way.
        except (
            *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError),
            *(LookupError, AttributeError, RecursionError),
        ) as err:
            raise DataError(
                f"the chat template in {self.place} fails on these messages: "
                f"{type(err).__name__}: {err}"
            ) from err

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        try:
            import jinja2
        except ImportError as err:
            raise DataError(
                f"the chat template in {self.place} needs the `jinja2` package: pip install "
                "'jaxfound[data]', or give the prompt as plain text"
            ) from err
        try:
            return _environment().from_string(self.text)
        except jinja2.TemplateSyntaxError as err:
            raise DataError(
                f"the chat template in {self.place} is not jinja2, line {err.lineno}: {err.message}"
            ) from err


def check_messages(messages: Sequence[Message]) -> None:
    """There is a message, and each says whose it is; DataError names the first that does not."""
    if not messages:
        raise DataError("a chat needs at least one message, e.g. role `user` and its content")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            raise DataError(
                f"message {number} has no role: it is {sorted(message)}, and needs `role`, a word "
                "such as `user`, beside its content"
            )


class _Refusal(Exception):
    """What a template says in raise_exception."""


def _environment() -> "jinja2.Environment":
    """Return the sandbox that templates of the Hub are written for."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `generation` marks the model's own words; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _refuse(text: str) -> NoReturn:
    raise _Refusal(text)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as a model has seen it: unlike jinja2's own filter, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
