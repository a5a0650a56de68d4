"""Requests that no model and no cache could serve."""

from jaxfound.serving.errors import RequestError
from jaxfound.serving.request import Request
from jaxfound.serving.sampler import MAX_TOP


def refuse(request: Request, *, vocab_size: int) -> None:
    """Refuse a request whose ids are none, or whose fields are out of range; lengths apart.

    Args:
        request: as it was made.
        vocab_size: ids of the tokenizer; rows of the model beyond them are no tokens.

    Raises:
        RequestError: names the field, its value and the rule.
    """
    biased = (token for token, _ in request.sampling.logit_bias)
    for name, ids in (("prompt", request.prompt), ("logit_bias", biased)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} holds the id {token}; ids go from 0 to {vocab_size - 1}"
                )
    if "" in request.stop:
        raise RequestError("stop holds an empty text, which would end every continuation at once")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP:
        raise RequestError(f"logprobs={request.logprobs} must be from 0 to {MAX_TOP}, or None")
