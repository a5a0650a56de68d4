"""The valid key that an unknown one was meant to be."""

import difflib
from collections.abc import Iterable

from jaxfound.config.aliases import ALIASES, nested_word
from jaxfound.config.describe import Catalog

CUTOFF = 0.7
MAX_SHOWN = 3


def unknown_key(key: str, catalog: Catalog) -> str:
    """Return a sentence that says `key` is unknown and which valid key is nearest.

    Args:
        key: dotted path whose last name is not a key of the section before it.
        catalog: the valid keys and sections.
    """
    section, _, name = key.rpartition(".")
    if name == "<<":
        return "merge keys are not read; write the keys of the other mapping out"
    launcher = nested_word(section, name)
    if launcher:
        return f"unknown key. {launcher}"
    valid = [*sorted(catalog.sections), *catalog.rows]
    here = [path for path in valid if path.rpartition(".")[0] == section]
    word = name.lower().replace("-", "_")
    same_word = sorted(path for path in valid if path.rpartition(".")[2] == word)
    if any(path in here for path in same_word):
        return f"unknown key. Did you mean {section + '.' if section else ''}{word}?"
    if same_word:
        return f"unknown key. `{word}` lives at {_list(same_word)}"
    near = _near(word, here) or _near(word, valid)
    if near:
        return f"unknown key. Did you mean {_list(near)}?"
    words = difflib.get_close_matches(word, ALIASES, n=1, cutoff=CUTOFF)
    if words and ALIASES[words[0]].key:
        return f"unknown key. Did you mean {words[0]}, which is {ALIASES[words[0]].key} here?"
    where = f"of {section}" if section else "at the top"
    return f"unknown key. The keys {where} are {', '.join(catalog.children(section))}"


def nearest_word(word: str, words: Iterable[str]) -> str:
    """Return a sentence that names the nearest of `words`, or nothing when none is near."""
    near = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.6)
    return f". Did you mean {near[0]}?" if near else ""


def _near(word: str, paths: Iterable[str]) -> list[str]:
    """Return the paths whose last name is like `word`, or whose initials it is; nearest first."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    names = difflib.get_close_matches(word, by_name, n=MAX_SHOWN, cutoff=CUTOFF)
    if not names and len(word) > 1:
        names = [name for name in by_name if "".join(p[:1] for p in name.split("_")) == word]
    return [path for name in names[:1] for path in by_name[name]]


def _list(paths: list[str]) -> str:
    return " or ".join(paths[:MAX_SHOWN])
