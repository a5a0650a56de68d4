"""Ids of a prompt, as the weights want it to begin."""

from collections.abc import Sequence

from jaxfound.config.schema import ConfigError
from jaxfound.data.tokenizer import Tokenizer


def prompt_ids(
    prompt: str | Sequence[int], *, tokenizer: Tokenizer, start: tuple[int, ...]
) -> list[int]:
    """Return all ids before the continuation: `start` and a text's ids, or whole ids as given.

    Raises:
        ConfigError: there are none.
    """
    text = isinstance(prompt, str)
    ids = [*start, *tokenizer.encode(prompt).tolist()] if text else list(prompt)
    if not ids:
        raise ConfigError("an empty prompt has nothing to continue: this model's prompts do not "
                          "begin with a start token. Give it some text")  # fmt: skip
    return ids
