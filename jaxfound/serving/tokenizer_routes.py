"""What the tokenizer's routes answer, so that a client needs no tokenizer of its own."""

from jaxfound.data.tokenizer import JsonTokenizer
from jaxfound.serving.api_error import bad
from jaxfound.serving.fields import Fields
from jaxfound.serving.json_body import name_of, read_object
from jaxfound.serving.logprob_json import Json, token_text
from jaxfound.serving.prompt_fields import check_ids, encode, read_messages
from jaxfound.serving.protocol import check_model
from jaxfound.serving.served import ServedModel


def tokenize(raw: bytes, served: ServedModel) -> Json:
    """Return the ids of `prompt`, or of `messages`, and how many they are.

    `add_special_tokens` (true) puts the start of a prompt before a text; `return_token_strs`
    (false) adds what each id looks like. Text is text, but for one case, in which clients ask for
    the id of a token that `/tokenizer_info` names: without `add_special_tokens`, a text that is a
    special token and nothing else is that token.

    Raises:
        ApiError: 400 names what is wrong.
    """
    fields = Fields(read_object(raw))
    check_model(fields, served)
    text = fields.text("prompt")
    messages = fields.take("messages")
    adds_start = fields.flag("add_special_tokens", default=True)
    shows = fields.flag("return_token_strs")
    fields.check_all_read()
    if (text is None) == (messages is None):
        raise bad("give either a prompt or messages", param="prompt")
    if text is None:
        ids = list(read_messages(messages, served))
    elif not adds_start and text in special_ids(served):
        ids = [special_ids(served)[text]]
    else:
        ids = [*(served.start if adds_start else ()), *encode(text, served)]
    words = [token_text(served.tokenizer, token) for token in ids] if shows else None
    found = {"count": len(ids), "max_model_len": served.max_length, "tokens": ids}
    return {**found, "token_strs": words}


def special_ids(served: ServedModel) -> dict[str, int]:
    """Return the ids of special tokens by how they are written."""
    if not isinstance(served.tokenizer, JsonTokenizer):
        return {}
    return {text: token.id for text, token in served.tokenizer.special_tokens.items()}


def detokenize(raw: bytes, served: ServedModel) -> Json:
    """Return the text of `tokens`; ApiError 400 names what is wrong."""
    fields = Fields(read_object(raw))
    check_model(fields, served)
    ids = fields.take("tokens")
    fields.check_all_read()
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise bad(f"tokens is {name_of(ids)}; it must be a list of token ids", param="tokens")
    check_ids(ids, served, param="tokens")
    return {"prompt": served.tokenizer.decode(ids)}


def tokenizer_info(served: ServedModel) -> Json:
    """Return the special tokens as written (null without one), sizes, and the chat template."""
    tokenizer = served.tokenizer
    special: Json = {"bos_token": None, "eos_token": None, "pad_token": None}
    if isinstance(tokenizer, JsonTokenizer):
        special = {
            "bos_token": tokenizer.text_of(tokenizer.bos_id) if tokenizer.has_bos else None,
            "eos_token": tokenizer.text_of(tokenizer.eos_id),
            "pad_token": tokenizer.text_of(tokenizer.pad_id),
        }
    return {
        "model": served.name,
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": served.max_length,
        "model_max_length": served.max_length,
        **special,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "chat_template": None if served.chat is None else served.chat.text,
    }
