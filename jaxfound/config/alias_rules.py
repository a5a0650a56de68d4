"""What a torch launcher's words come to: native entries, each reported, none guessed.

Most words are a native key under another name and enter the source they stand in. The others
depend on keys that may stand anywhere, so they are worked out when every source has been read:

* `zero_stage`: the same stage; from 1 on fsdp takes the replicas of `data_parallel_size`.
* `data_parallel_size` counts every device with rows of its own: data x fsdp x expert.
* `micro_batch_size` counts rows of one device: batch = rows x micro-batches x those devices.
* `num_attention_heads`, where nothing says more: as many key/value heads, hidden_size / heads wide.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfound.config.aliases import ALIASES, Alias
from jaxfound.config.layers import Entry, Layer, Origin, Problem
from jaxfound.config.yaml_source import flow

log = logging.getLogger(__name__)

FSDP, EXPERT, STAGE = "parallel.fsdp", "parallel.expert", "parallel.zero_stage"
BATCH, PIECES, DATA = "train.batch_size", "parallel.num_microbatches", "parallel.data"
HEADS, KV_HEADS, HEAD_DIM = "model.num_heads", "model.gqa.num_kv_heads", "model.gqa.head_dim"

# Rules of words that are a native key under another name, whatever else they may be.
DIRECT = ("same", "heads")

ZERO_WAY_OUT = (
    f"{FSDP}=N cuts state over N devices: {STAGE}=1 the optimizer's, 2 also summed gradients, "
    "3 also parameters"
)


def enter_aliases(layers: Sequence[Layer]) -> list[Problem]:
    """Give each layer the native entries of its words; return what cannot be used.

    Args:
        layers: the sources that speak together, a file alone or all overrides: two names of one
            key in them must agree, while between files and overrides the later wins.
    """
    problems: list[Problem] = []
    said: dict[str, dict[str, Entry]] = {}
    for layer in layers:
        for key, entry in layer.entries.items():
            said.setdefault(key, {})[key] = entry
        for word, entry in layer.words.items():
            alias = ALIASES[word]
            if alias.rule not in DIRECT:
                continue
            native = _native(word, entry, alias)
            if native is None:
                problems.append(_refusal(layer.source.rank, word, entry, _takes(entry, alias)))
                continue
            layer.entries[alias.key] = native
            said.setdefault(alias.key, {})[word] = native
    rank = {layer.source.place: layer.source.rank for layer in layers}
    disagreeing = ((key, names) for key, names in said.items() if _differ(names.values()))
    return problems + [_disagreement(rank, key, names) for key, names in disagreeing]


def _differ(entries: Iterable[Entry]) -> bool:
    values = [entry.value for entry in entries]
    return any(value != values[0] for value in values)


def _native(word: str, entry: Entry, alias: Alias) -> Entry | None:
    """Return the entry of the alias' key, or None when the value is no word of the alias."""
    origin = replace(entry.origin, word=word, native=alias.key)
    if not alias.values:
        return Entry(entry.value, origin, {})
    for theirs, ours in alias.values:
        if type(theirs) is type(entry.value) and theirs == entry.value:
            return Entry(ours, origin, {})
    return None


def _takes(entry: Entry, alias: Alias) -> str:
    theirs = ", ".join(flow(value) for value, _ in alias.values)
    ours = ", ".join(dict.fromkeys(str(value) for _, value in alias.values))
    return f"takes {theirs}; got {_shown(entry)}. In words of {alias.key}: {ours}"


def _refusal(rank: int, word: str, entry: Entry, text: str) -> Problem:
    origin = entry.origin
    # Under the native key, so that nothing else is said of a value that nobody could give.
    key = ALIASES[word].key or word
    return Problem((rank, origin.line, origin.column), key, origin.message(word, text))


def _disagreement(rank: Mapping[str, int], key: str, names: Mapping[str, Entry]) -> Problem:
    """Return the problem of names of one key that say different things, at the last alias."""
    word = [name for name in names if name != key][-1]
    entry = names[word]
    name, against = next((n, e) for n, e in names.items() if e.value != entry.value)
    text = (
        f"{_shown(entry)} is for {key}, and {against.origin.source} says {name}: "
        f"{_shown(against)}. Keep one"
    )
    return _refusal(rank[entry.origin.place], word, entry, text)


def _shown(entry: Entry) -> str:
    return entry.origin.shown or str(entry.value)


@dataclass
class Sheet:
    """What all sources said together, while the words that depend on it are worked out.

    Attributes:
        words: the launcher's words, of each the entry that won.
        entries: by native key, of each the entry that won; the rules add to it.
        rank: orders an origin among the sources.
        problems: what the rules refuse.
        unknown: native keys that a word was to give and, for a problem, does not.
        found: by word, what it came to, as `key=value`.
    """

    words: Mapping[str, Entry]
    entries: dict[str, Entry]
    rank: Callable[[Origin], int]
    problems: list[Problem] = field(default_factory=list[Problem])
    unknown: set[str] = field(default_factory=set[str])
    found: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def with_rule(self, rule: str) -> Iterator[str]:
        """Yield the words in use that have this rule."""
        return (word for word in self.words if ALIASES[word].rule == rule)

    def count(self, key: str) -> int | None:
        """Return the whole number that `key` was given, None without one."""
        entry = self.entries.get(key)
        value = entry.value if entry else None
        return value if type(value) is int and value > 0 else None

    @property
    def sharded(self) -> int:
        """Devices with rows of their own for each device of the `data` axis."""
        return (self.count(FSDP) or 1) * (self.count(EXPERT) or 1)

    def whole(self, word: str) -> int | None:
        """Return a word's whole number >= 1; anything else is refused."""
        value = self.words[word].value
        if type(value) is int and value > 0:
            return value
        self.refuse(word, f"takes whole number >= 1; got {_shown(self.words[word])}")
        return None

    def refuse(self, word: str, text: str) -> None:
        """Remember that a word cannot be used."""
        entry = self.words[word]
        problem = _refusal(self.rank(entry.origin), word, entry, text)
        if problem not in self.problems:
            self.problems.append(problem)

    def give(self, word: str, key: str, value: int | str) -> None:
        """Let `key` be `value` on behalf of `word`; another value already said is refused."""
        said = self.entries.get(key)
        if said is not None and said.value != value:
            name = said.origin.word or key
            self.refuse(
                word,
                f"{_shown(self.words[word])} comes to {key}={value}, but {said.origin.source} "
                f"says {name}: {_shown(said)}. Keep one",
            )
            return
        if said is None:
            origin = replace(self.words[word].origin, word=word, native=key)
            self.entries[key] = Entry(value, origin, {})
        self.found.setdefault(word, []).append(f"{key}={value}")


def resolve_aliases(sheet: Sheet) -> None:
    """Work out the words that depend on other keys, in the order that they depend on each other."""
    for rule, work in RULES:
        for word in sheet.with_rule(rule):
            work(sheet, word)
    _refuse_heads_of_latents(sheet)


def report_aliases(sheet: Sheet) -> dict[str, str]:
    """Log each word with what it came to, once, and return that by word."""
    came_to: dict[str, str] = {}
    for word, entry in sheet.words.items():
        key = ALIASES[word].key
        native = [f"{key}={sheet.entries[key].value}"] if ALIASES[word].rule in DIRECT else []
        came_to[word] = ", ".join([*native, *sheet.found.get(word, [])])
        fields = {"word": word, "native": came_to[word], "at": entry.origin.source}
        log.warning("config.alias", extra=fields)
    return came_to


def _zero(sheet: Sheet, word: str) -> None:
    stage, fsdp = sheet.words[word].value, sheet.entries.get(FSDP)
    if type(stage) is not int or not 0 <= stage <= 3:
        sheet.refuse(word, f"takes 0, 1, 2 or 3; got {_shown(sheet.words[word])}")
        return
    sheet.give(word, STAGE, stage)
    if stage == 0:
        return
    if fsdp is None:
        _shard_replicas(sheet, word)
    elif fsdp.value == 1:
        sheet.refuse(word, f"{stage} shards over devices, but {fsdp.origin.source} says {FSDP}: 1")
    else:
        sheet.found.setdefault(word, []).append(f"{FSDP}={fsdp.value}")


def _shard_replicas(sheet: Sheet, word: str) -> None:
    """A launcher's stages shard over every replica: fsdp takes `data_parallel_size`."""
    size = next(sheet.with_rule("replicas"), None)
    if size is None:
        stage = sheet.words[word].value
        sheet.refuse(word, f"{stage} needs a number of devices. {ZERO_WAY_OUT}")
        return
    replicas = sheet.whole(size)
    # What does not divide is refused as `data_parallel_size`.
    if replicas is not None and replicas % sheet.sharded == 0:
        sheet.give(word, FSDP, replicas // sheet.sharded)


def _replicas(sheet: Sheet, word: str) -> None:
    replicas = sheet.whole(word)
    if replicas is None:
        return
    if replicas % sheet.sharded:
        sheet.refuse(
            word,
            f"{replicas} devices with rows of their own cannot be data x {FSDP} x {EXPERT}: the "
            f"last two are {sheet.sharded}, which does not divide {replicas}",
        )
        return
    sheet.give(word, DATA, replicas // sheet.sharded)


def _device_rows(sheet: Sheet, word: str) -> None:
    rows, data = sheet.whole(word), sheet.count(DATA)
    batch, pieces = sheet.count(BATCH), sheet.count(PIECES)
    if rows is None or sheet.problems:
        sheet.unknown.add(BATCH)
        return
    if data is None:
        _replicas_from_rows(sheet, word, rows * sheet.sharded)
        return
    rows_of_piece = rows * data * sheet.sharded
    if batch is None:
        sheet.give(word, PIECES, pieces or 1)
        sheet.give(word, BATCH, rows_of_piece * (pieces or 1))
    elif batch % rows_of_piece:
        sheet.refuse(
            word,
            f"{rows} rows x {data * sheet.sharded} devices = {rows_of_piece} do not divide "
            f"{BATCH}={batch} into whole micro-batches",
        )
    else:
        sheet.give(word, PIECES, batch // rows_of_piece)


def _replicas_from_rows(sheet: Sheet, word: str, per_replica: int) -> None:
    """Without a number of replicas, batch and micro-batches together say it."""
    batch, pieces = sheet.count(BATCH), sheet.count(PIECES)
    if batch is None or pieces is None:
        sheet.refuse(
            word,
            "counts the rows of one device, so the batch depends on how many there are: add "
            f"data_parallel_size ({DATA}), or give global_batch_size ({BATCH}) and "
            f"gradient_accumulation_steps ({PIECES})",
        )
    elif batch % (per_replica * pieces):
        sheet.refuse(
            word,
            f"{_shown(sheet.words[word])} x {PIECES}={pieces} does not divide {BATCH}={batch} "
            "over whole devices",
        )
    else:
        _give_auto(sheet, word, batch // (per_replica * pieces))


def _give_auto(sheet: Sheet, word: str, data: int) -> None:
    """`parallel.data: auto` is no number of devices, so a number does not contradict it."""
    said = sheet.entries.get(DATA)
    if said is not None and said.value == "auto":
        del sheet.entries[DATA]
    sheet.give(word, DATA, data)


def _heads(sheet: Sheet, word: str) -> None:
    mixer = sheet.entries.get("model.mixer")
    heads, width = sheet.count(HEADS), sheet.count("model.embed_dim")
    if heads is None or (mixer is not None and mixer.value != "gqa"):
        return
    if KV_HEADS not in sheet.entries:
        sheet.give(word, KV_HEADS, heads)
    if HEAD_DIM in sheet.entries or width is None:
        return
    if width % heads:
        sheet.refuse(
            word,
            f"{heads} does not divide hidden_size={width}, so a head has no width of its own to "
            f"take. Give head_dim ({HEAD_DIM})",
        )
        return
    sheet.give(word, HEAD_DIM, width // heads)


def _always_on(sheet: Sheet, word: str) -> None:
    if sheet.words[word].value is True:
        sheet.found[word] = ["no key: attention always takes the fastest kernel that is right"]
        return
    sheet.refuse(
        word,
        f"takes true; got {_shown(sheet.words[word])}. Attention always takes the fastest kernel "
        "that is right for the case. Remove the key",
    )


def _refuse_heads_of_latents(sheet: Sheet) -> None:
    """Refuse words of grouped heads in a model with latent attention, where they do nothing."""
    mixer = sheet.entries.get("model.mixer")
    if mixer is None or mixer.value != "mla":
        return
    for word in sheet.words:
        if ALIASES[word].key.startswith("model.gqa."):
            sheet.refuse(
                word,
                "the model has latent attention (model.mixer=mla): its sizes are model.num_heads "
                "and model.mla. Remove the key",
            )


RULES: tuple[tuple[str, Callable[[Sheet, str], None]], ...] = (
    ("zero", _zero),
    ("replicas", _replicas),
    ("device_rows", _device_rows),
    ("heads", _heads),
    ("always_on", _always_on),
)
