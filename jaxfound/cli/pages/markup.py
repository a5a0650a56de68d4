"""Well-formed markup: text is escaped unless it is markup already."""

import html
import re

# Controls have no place in a page, so a reader sees their pictures (U+2400 and on).
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}


class Markup(str):
    """Text that is markup already and goes into a page as it is."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return `text` as markup that shows it, whatever characters it holds."""
    if isinstance(text, Markup):
        return text
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(_CONTROLS.sub(_picture, whole)))


def element(tag: str, /, *children: str, **attributes: str | int | float | None) -> Markup:
    """Return one element with its children escaped unless they are markup.

    Args:
        tag: name of the element.
        children: text or markup, in order; without any the tag closes itself.
        attributes: `class_` and `for_` lose their underscore, others turn it into a hyphen; None
            leaves the attribute out.
    """
    written = "".join(
        f' {_attribute(key)}="{escaped(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children:
        return Markup(f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{joined(*children)}</{tag}>")


def joined(*parts: str) -> Markup:
    """Return the parts one after another, each escaped unless it is markup."""
    return Markup("".join(escaped(part) for part in parts))


def _picture(control: re.Match[str]) -> str:
    return _PICTURES.get(ord(control[0]), "\ufffd")


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _plain(value: str | int | float) -> str:
    """Return a coordinate to a tenth of a pixel, which keeps a page of thousands small."""
    return value if isinstance(value, str) else f"{round(value, 1):g}"
