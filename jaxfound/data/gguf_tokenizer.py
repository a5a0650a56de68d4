"""The tokenizer inside a GGUF file's metadata, as the tokenizer.json it was made from."""

import json
from collections.abc import Mapping
from typing import cast

from jaxfound.data.errors import DataError
from jaxfound.data.tokenizer_json import CONFIG, JsonTokenizer, Settings

Json = dict[str, object]

# tokenizer.ggml.token_type: what a token is.
CONTROL, USER_DEFINED = 3, 4
BYTE_LEVEL: Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
# tokenizer.ggml.pre: how text is cut before the merges. Wrong cuts give plausible, wrong ids, so
# a name that is not here is refused.
CUTS: dict[str, Json] = {
    "gpt-2": BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
    },
}
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def gguf_tokenizer(metadata: Mapping[str, object], *, place: str) -> JsonTokenizer:
    """Return the tokenizer that a GGUF file carries.

    Args:
        metadata: the file's entries, `tokenizer.ggml.*` and `tokenizer.chat_template` among them.
        place: the file, for messages.

    Raises:
        DataError: as `tokenizer_files`, and if `tokenizers` is not installed.
    """
    files = tokenizer_files(metadata, place=place)
    settings = Settings.of(json.loads(files[CONFIG]), place=place)
    return JsonTokenizer(files["tokenizer.json"], settings, name=place)


def tokenizer_files(metadata: Mapping[str, object], *, place: str) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json by name, ready to be written to a folder.

    Raises:
        DataError: if the metadata hold no byte-level BPE, cut text by an unknown rule, or are
            damaged.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise DataError(
            f"{place}: tokenizer.ggml.model is {model!r}; only `gpt2`, byte-level BPE, is read. "
            "Name the model's own tokenizer.json"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in CUTS:
        raise DataError(
            f"{place}: tokenizer.ggml.pre is {pre!r}, a rule for cutting text that is not known "
            f"here; known are {', '.join(CUTS)}. Name the model's own tokenizer.json"
        )
    tokens = _texts(metadata, "tokens", place)
    document = _document(metadata, tokens, cut=CUTS[cast(str, pre)], place=place)
    config: Json = {
        f"{ours}_token": _token(metadata, tokens, f"{theirs}_token_id", place)
        for ours, theirs in NAMES.items()
    }
    config["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", False)
    config["chat_template"] = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer.json": json.dumps(document, ensure_ascii=False).encode(),
        CONFIG: json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }


def _document(metadata: Mapping[str, object], tokens: list[str], *, cut: Json, place: str) -> Json:
    """Return a tokenizer.json of these tokens and merges."""
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise DataError(f"{place}: tokenizer.ggml.tokens holds a token twice")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise DataError(f"{place}: tokenizer.ggml.token_type is not one number a token")
    # A token has no blank of its own: byte-level BPE writes it as another character.
    merges = [line.split(" ") for line in _texts(metadata, "merges", place)]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise DataError(f"{place}: the merge {' '.join(pair)!r} is not of two known tokens")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(number, token, special=kind == CONTROL)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _added(number: int, token: str, *, special: bool) -> Json:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": number, "content": token, "special": special, **dict.fromkeys(flags, False)}


def _texts(metadata: Mapping[str, object], part: str, place: str) -> list[str]:
    texts = metadata.get(f"tokenizer.ggml.{part}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place}: tokenizer.ggml.{part} is not a list of texts")
    return texts


def _token(metadata: Mapping[str, object], tokens: list[str], part: str, place: str) -> str | None:
    """Return the text of the token whose id the metadata give; None if they give none."""
    number = metadata.get(f"tokenizer.ggml.{part}")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise DataError(
            f"{place}: tokenizer.ggml.{part} is {number!r}; the file has {len(tokens)} tokens"
        )
    return tokens[number]
