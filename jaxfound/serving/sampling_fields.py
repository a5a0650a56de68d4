"""The fields of a body that say how tokens are drawn."""

from jaxfound.serving.api_error import bad
from jaxfound.serving.fields import Fields
from jaxfound.serving.sampling import MAX_BIASES, Sampling

# Logits divided by less than this are float32's infinity; the result is the most likely token.
COLDEST = 1e-5


def read_sampling(fields: Fields, *, vocab_size: int) -> Sampling:
    """Return how tokens are drawn; OpenAI's defaults; seed None where none is given.

    `top_k`, `min_p` and `repetition_penalty` are read beside OpenAI's own fields.

    Raises:
        ApiError: 400, names the field.
    """
    temperature = fields.number("temperature", 1.0, low=0.0, high=100.0)
    top_k = fields.integer("top_k", 0, low=-1, high=2**31 - 1) or 0
    return Sampling(
        temperature=0.0 if temperature < COLDEST else temperature,
        top_k=max(top_k, 0),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0, above=True),
        seed=fields.integer("seed", None, low=-(2**63), high=2**63 - 1),
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, low=0.01, high=100.0),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        logit_bias=read_logit_bias(fields, vocab_size=vocab_size),
    )


def read_logit_bias(fields: Fields, *, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return ids and what is added to their logits, in order of the ids."""
    value = fields.take("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", value, "an object of token ids", wrong_type=True)
    if len(value) > MAX_BIASES:
        raise bad(f"logit_bias has {len(value)} ids; at most {MAX_BIASES}", param="logit_bias")
    found: dict[int, float] = {}
    for written, bias in value.items():
        digits = written.isascii() and written.isdigit() and len(written) < 12
        if not digits or int(written) >= vocab_size:
            raise bad(
                f"logit_bias names {written[:20]!r}; token ids go from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        rule = "biases from -100 to 100"
        found[int(written)] = fields.as_number("logit_bias", bias, rule, low=-100.0, high=100.0)
    return tuple(sorted(found.items()))
