"""Prompts and conversations of a body, as token ids that fit the model."""

from jaxfound.data.chat import chat_ids
from jaxfound.data.errors import DataError
from jaxfound.serving.api_error import bad
from jaxfound.serving.fields import Fields
from jaxfound.serving.json_body import name_of
from jaxfound.serving.served import ServedModel

MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant")

# The ids of a prompt, and its text where it was given as text.
type Prompt = tuple[tuple[int, ...], str | None]


def read_prompts(value: object, served: ServedModel) -> list[Prompt]:
    """Return the ids of each prompt, and its text where it was given as text.

    A prompt is a text, a list of token ids, a list of texts, or a list of lists of token ids.
    """
    if value is None:
        raise bad("the body has no prompt: give a text or token ids", param="prompt")
    if isinstance(value, str) or (isinstance(value, list) and _are_ids(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else name_of(value)
        raise bad(
            f"prompt is {what}; it must be a text, token ids, or a list of either",
            param="prompt",
        )
    return [_read_prompt(each, served) for each in value]


def _are_ids(values: list[object]) -> bool:
    return bool(values) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def _read_prompt(value: object, served: ServedModel) -> Prompt:
    if isinstance(value, str):
        ids = (*served.start, *encode(value, served))
        if not ids:
            raise bad(
                "prompt is empty, and this model's prompts begin with no start token: give it "
                "some text",
                param="prompt",
            )
        return ids, value
    if not isinstance(value, list) or not _are_ids(value):
        raise bad(
            f"a prompt of the list is {'an empty list' if value == [] else name_of(value)}; it "
            "must be a text or a list of token ids",
            param="prompt",
        )
    check_ids(value, served, param="prompt")
    return tuple(value), None


def encode(text: str, served: ServedModel) -> list[int]:
    """Return the ids of a text; ApiError 400 if the tokenizer refuses it."""
    try:
        return served.tokenizer.encode(text).tolist()
    except ValueError as err:
        raise bad(f"the text cannot be encoded: {err}", param="prompt") from err


def check_ids(ids: list[int], served: ServedModel, *, param: str) -> None:
    """Every id is one of the tokenizer's; ApiError 400 names the first that is not."""
    largest = served.tokenizer.vocab_size - 1
    for token in ids:
        if not 0 <= token <= largest:
            raise bad(
                f"{param} holds the token id {str(token)[:20]}; ids go from 0 to {largest}",
                param=param,
            )


def read_messages(value: object, served: ServedModel) -> tuple[int, ...]:
    """Return the ids of a conversation, up to where the model's answer begins."""
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else name_of(value)
        raise bad(f"messages is {what}; it must be a list of messages", param="messages")
    if len(value) > MAX_MESSAGES:
        raise bad(f"messages holds {len(value)}; at most {MAX_MESSAGES} are read", param="messages")
    messages = [_message(each, number) for number, each in enumerate(value)]
    try:
        ids = chat_ids(served.tokenizer, messages, template=served.chat)
    except DataError as err:
        raise bad(str(err), param="messages", code="chat_template") from err
    return tuple(ids.tolist())


def _message(value: object, number: int) -> dict[str, object]:
    where = f"messages[{number}]"
    if not isinstance(value, dict):
        raise bad(f"{where} is {name_of(value)}; it must be an object", param=where)
    fields = Fields(value, prefix=f"{where}.")
    role = fields.text("role")
    if role not in ROLES:
        raise fields.wrong("role", role, f"one of {', '.join(ROLES)}")
    name = fields.text("name")
    message: dict[str, object] = {"role": role, "content": _content(fields)}
    fields.check_all_read()
    return message if name is None else {**message, "name": name}


def _content(fields: Fields) -> str:
    """Return a message's text: as it is, or joined from parts of text."""
    value = fields.take("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fields.wrong("content", value, "a text or a list of parts", wrong_type=True)
    parts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise fields.wrong(
                "content", value, 'parts of {"type": "text", "text": …}; only text is served'
            )
        parts.append(text)
    return "".join(parts)


def check_length(num_prompt: int, max_tokens: int, served: ServedModel) -> None:
    """Prompt and continuation fit into the context; ApiError 400 says all three numbers."""
    if num_prompt + max_tokens <= served.max_length:
        return
    room = served.max_length - num_prompt
    # JSON's integers have no largest one.
    asked = f"{max_tokens}" if max_tokens < 10**15 else "more than 10^15"
    way_out = f"ask for at most {room} tokens" if room > 0 else "shorten the prompt"
    raise bad(
        f"this model's context is {served.max_length} tokens: the prompt has {num_prompt} and "
        f"max_tokens asks for {asked} more. {way_out.capitalize()}",
        param="max_tokens" if room > 0 else "prompt",
        code="context_length_exceeded",
    )
