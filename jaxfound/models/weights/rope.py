"""Rotary positions in config.json: two spellings of one thing, both read, both written.

Older files have `rope_theta` beside a `rope_scaling` (whose kind is called `type` or `rope_type`);
newer ones put everything into `rope_parameters`. A reader of one that meets the other falls back
to a default without a word, so both are written.
"""

from collections.abc import Mapping
from typing import NamedTuple, cast

from jaxfound.config.model import RopeConfig
from jaxfound.models.layers.rope import rotation_factor
from jaxfound.models.weights.errors import WeightsError
from jaxfound.models.weights.folder import Json
from jaxfound.models.weights.keys import Keys

# What a file means that names no base.
DEFAULT_THETA = 10_000.0
# Their name for a rule, ours.
RULES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Our key, theirs, for the numbers of each rule.
NUMBERS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    "linear": (("factor", "factor"),),
    "llama3": (
        ("factor", "factor"),
        ("low_freq_factor", "low_freq_factor"),
        ("high_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        ("factor", "factor"),
        ("beta_fast", "beta_fast"),
        ("beta_slow", "beta_slow"),
        ("mscale", "mscale"),
        ("mscale_all_dim", "mscale_all_dim"),
    ),
}
NEEDED = ("factor", "low_freq_factor", "high_freq_factor")
ORIGINAL = "original_max_position_embeddings"
# Rules that ask for it; in a file of another rule it says nothing.
FROM_ORIGINAL = ("llama3", "yarn")
# Numbers of some rule: without influence where that rule is not in force.
NEUTRAL = frozenset({ORIGINAL, *(theirs for rows in NUMBERS.values() for _, theirs in rows)})


class ReadRope(NamedTuple):
    """A RopeConfig's values, and a note when the file left the base to the reader."""

    values: Json
    note: str


def read_rope(keys: Keys, *, pairing: str) -> ReadRope:
    """Return our rope section of a config.json in either spelling, or both.

    Raises:
        WeightsError: if the rule is unknown, a number is missing, or the spellings disagree.
    """
    scaling, parameters = keys.raw("rope_scaling"), keys.raw("rope_parameters")
    thetas = {"rope_theta": keys.raw("rope_theta")}
    found: dict[str, Json] = {}
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is None:
            continue
        section = _section(name, value, place=keys.place)
        thetas[f"{name}.rope_theta"] = section.raw("rope_theta")
        found[name] = _read_rule(section)
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        raise WeightsError(
            f"{keys.place}: rope_scaling and rope_parameters disagree: "
            f"{found['rope_scaling']} and {found['rope_parameters']}. Remove the wrong one"
        )
    theta, note = _theta(thetas, place=keys.place)
    rule = next(iter(found.values()), {})
    return ReadRope({"theta": theta, "pairing": pairing, **rule}, note)


def _section(name: str, value: object, *, place: str) -> Keys:
    if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
        raise WeightsError(
            f"{place}: {name}={value!r} is not one rule for all layers, the only form read here"
        )
    return Keys(cast(Json, value), place=f"{place}: {name}")


def _theta(thetas: Mapping[str, object], *, place: str) -> tuple[float, str]:
    """Return the one base that all spellings give."""
    given = {name: value for name, value in thetas.items() if value is not None}
    if not given:
        return (
            DEFAULT_THETA,
            f"rope_theta is not in the file: {DEFAULT_THETA:g}, what it means then",
        )
    wrong = [n for n, v in given.items() if isinstance(v, bool) or not isinstance(v, int | float)]
    if wrong:
        raise WeightsError(f"{place}: {wrong[0]} takes a number; got {given[wrong[0]]!r}")
    values = {float(cast(float, value)) for value in given.values()}
    if len(values) > 1:
        told = " and ".join(f"{name}={value}" for name, value in given.items())
        raise WeightsError(f"{place}: {told} disagree. Remove the wrong one")
    return values.pop(), ""


def _kind(section: Keys) -> str:
    """Return their name of a section's rule, a key of RULES."""
    names = {key: section.raw(key) for key in ("rope_type", "type")}
    given = {str(name) for name in names.values() if name is not None}
    if len(given) > 1:
        raise WeightsError(f"{section.place}: rope_type and type disagree: {sorted(given)}")
    numbers = [key for key in sorted(NEUTRAL) if key in section]
    if not given and numbers:
        raise WeightsError(
            f"{section.place}: {', '.join(numbers)} without a rope_type, which says what to "
            f"do with it; known types are {', '.join(RULES)}"
        )
    kind = given.pop() if given else "default"
    if kind not in RULES:
        raise WeightsError(
            f"{section.place}: rope type {kind!r} is not supported; known are {', '.join(RULES)}"
        )
    return kind


def _read_rule(section: Keys) -> Json:
    """Return our keys of one spelling's rule, the base apart."""
    kind = _kind(section)
    rule = RULES[kind]
    values: Json = {"scaling": rule}
    for ours, theirs in NUMBERS[rule]:
        if theirs in NEEDED or theirs in section:
            values[ours] = section.take(theirs, float)
        section.raw(theirs)
    section.raw(ORIGINAL)
    if rule in FROM_ORIGINAL:
        values["original_max_positions"] = section.take(ORIGINAL, int)
    if rule == "yarn":
        _check_yarn(section, values)
    section.must_be("partial_rotary_factor", (1, 1.0), "all channels rotate")
    # Numbers of another rule say nothing where none is in force; unknown ones might.
    strange = [key for key in section.unread() if rule != "none" or key not in NEUTRAL]
    if strange:
        raise WeightsError(
            f"{section.place}: {', '.join(strange)}: not known for rope type {kind!r}, and it "
            "might change the numbers"
        )
    return values


def _check_yarn(section: Keys, values: Json) -> None:
    """Refuse what published readers of YaRN understand differently."""
    section.must_be("truncate", (True,), "the ramp's ends are whole channels")
    section.must_be("finetuned", (True, False), "it is a flag")
    mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if ((mscale or 1.0) != 1.0 and not all_dim) or (all_dim and not mscale):
        raise WeightsError(
            f"{section.place}: mscale={mscale} with mscale_all_dim={all_dim} is read in two ways "
            "by published code. Give both, or neither"
        )
    if "attention_factor" in section:
        factor = section.take("attention_factor", float)
        own = rotation_factor(RopeConfig.model_validate(values))
        if abs(factor - own) > 1e-6:
            raise WeightsError(
                f"{section.place}: attention_factor={factor} is not the {own:.7g} that factor and "
                "mscale give, and no model here takes another"
            )


def write_rope(rope: RopeConfig) -> Json:
    """Return both spellings of a rope section.

    Raises:
        WeightsError: if published readers would understand it differently.
    """
    if rope.scaling == "none":
        rule: Json = {}
    else:
        rule = {theirs: getattr(rope, ours) for ours, theirs in NUMBERS[rope.scaling]}
        if rope.scaling in FROM_ORIGINAL:
            rule[ORIGINAL] = rope.original_max_positions
    if rope.scaling == "yarn" and not rope.mscale_all_dim:
        if rope.mscale != 1.0:
            raise WeightsError(
                f"rope.mscale={rope.mscale} with mscale_all_dim=0 is read in two ways by published "
                "code: it cannot be written so that both are right"
            )
        del rule["mscale"], rule["mscale_all_dim"]
    kind = next(theirs for theirs, ours in RULES.items() if ours == rope.scaling)
    old = {"type": kind, "rope_type": kind, **rule} if rule else None
    new = {"rope_type": kind, "rope_theta": rope.theta, **rule}
    return {"rope_theta": rope.theta, "rope_scaling": old, "rope_parameters": new}
