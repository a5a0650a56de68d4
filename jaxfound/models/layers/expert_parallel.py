"""Experts on other devices: tokens are dispatched to them and their outputs combined at home.

A token goes once to each device that owns some of its experts. Its outputs come back one by one,
so that they are summed at home in the router's order and in float32, as on one device. Shapes have
room for whatever the router does; nothing is dropped.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxfound.communication.dispatch import Exchange, Runs, announce
from jaxfound.models.layers.expert_tiles import (
    Kernels,
    KernelsBeside,
    Product,
    Tiles,
    in_tiles,
    inverse,
    moved,
    outputs_here,
    outputs_of_all,
    swiglu,
    tiles_of,
    touches_most,
)

# Tokens are exchanged in so many pieces that the rows of a piece take no more than this in the
# tiles of one device when all of them go there.
PIECE_BYTES = 2 * 2**30


def expert_degree() -> int:
    """Return the devices along `expert` of the mesh in force."""
    return jax.sharding.get_abstract_mesh().shape.get("expert", 1)


def outputs_of_choices(
    tokens: Float[Array, "M D"],
    experts: Int[Array, "M A"],
    kernels: Kernels | KernelsBeside,
    *,
    product: Product | None = None,
    decoding: bool = False,
) -> Float[Array, "M A D"]:
    """Return what each token's experts make of it, wherever they are.

    Args:
        tokens: of this device.
        experts: numbers among the experts of all devices.
        kernels: of this device's experts.
        product: format of the products; that of the tokens by default.
        decoding: whether reading the kernels is what takes the time.
    """
    if expert_degree() == 1:
        if decoding and touches_most(*experts.shape, num_experts=kernels[0].shape[0]):
            return outputs_of_all(tokens, experts, cast("Kernels", kernels), product)
        return outputs_here(tokens, experts, kernels, product)
    ways = ways_of(*experts.shape, experts_here=kernels[0].shape[0])
    pieces = num_pieces(ways, row_bytes=tokens.shape[1] * tokens.dtype.itemsize)
    if pieces == 1:
        return outputs_there(tokens, experts, kernels, product)
    # Kept for the backward pass, the worst cases of all pieces would be there at once.
    one = jax.checkpoint(lambda piece: outputs_there(piece[0], piece[1], kernels, product))
    cut = (a.reshape(pieces, -1, a.shape[1]) for a in (tokens, experts))
    return jax.lax.map(one, tuple(cut)).reshape(*experts.shape, -1)


class Ways(NamedTuple):
    """The exchanges of a layer, with room for the worst case.

    Attributes:
        out: of tokens, each to the devices of its experts.
        home: of outputs, packed at home in the order of devices, tokens and choices.
    """

    out: Exchange
    home: Exchange


def ways_of(num_tokens: int, num_choices: int, *, experts_here: int) -> Ways:
    """Return the exchanges of a device's tokens, with `experts_here` experts on each device."""
    most_here = min(num_choices, experts_here)
    return Ways(
        out=Exchange("expert", num_tokens * min(num_choices, expert_degree()), num_tokens),
        home=Exchange("expert", num_tokens * num_choices, num_tokens * most_here),
    )


def num_pieces(ways: Ways, *, row_bytes: int) -> int:
    """Return into how many equal pieces tokens are cut so that `PIECE_BYTES` holds."""
    num_tokens = ways.out.longest_run
    wanted = -(-expert_degree() * ways.home.longest_run * row_bytes // PIECE_BYTES)
    return next((n for n in range(wanted, num_tokens) if num_tokens % n == 0), num_tokens)


def outputs_there(
    tokens: Float[Array, "M D"],
    experts: Int[Array, "M A"],
    kernels: Kernels | KernelsBeside,
    product: Product | None = None,
) -> Float[Array, "M A D"]:
    """Return what each token's experts make of it, on the devices that own them.

    Call it inside a shard_map that is manual over `expert`. With N devices, N·M tokens have room on
    each, and N·M·min(A, experts of a device) choices.
    """
    ways = ways_of(*experts.shape, experts_here=kernels[0].shape[0])
    sent = plan_of(experts, experts_here=kernels[0].shape[0], packed_rows=ways.out.packed_rows)
    got = dispatch(tokens, sent, ways.out)
    tiles = tiles_of(
        jnp.where(got.numbers > 0, got.numbers - 1, kernels[0].shape[0]).reshape(-1),
        num_experts=kernels[0].shape[0],
        most_choices=expert_degree() * ways.home.longest_run,
    )
    rows = got.rows.reshape(-1, tokens.shape[1])
    outputs = swiglu(in_tiles(rows, tiles), kernels, tiles, product)
    blocks = by_sender(outputs, tiles, got.numbers > 0, longest_run=ways.home.longest_run)
    home = ways.home.back(blocks, got.choice_runs)
    choice_of_place = inverse(sent.place_of_choice, size=experts.size)
    picked = moved(home, sent.place_of_choice, choice_of_place[:, None])
    return picked.reshape(*experts.shape, -1)


class Sent(NamedTuple):
    """What a device sends, and where what comes back belongs.

    Attributes:
        token_of_row: the token that each packed row is; M for none.
        row_of_choice: the row a choice travels in, if it is its token's first on that device;
            else the number of packed rows.
        numbers_of_row: for each choice of the row's token 1 + the expert's number on the device
            the row goes to; 0 where that expert is elsewhere.
        place_of_choice: where a choice's output stands among all that come back.
        sizes: rows that go to each device, and choices made there.
    """

    token_of_row: Int[Array, " R"]
    row_of_choice: Int[Array, "M A"]
    numbers_of_row: Int[Array, "R A"]
    place_of_choice: Int[Array, " C"]
    sizes: Int[Array, "2 N"]


def plan_of(experts: Int[Array, "M A"], *, experts_here: int, packed_rows: int) -> Sent:
    """Return what goes to each device: its tokens in their order, each of them once."""
    degree, device_MA = expert_degree(), experts // experts_here
    chosen_MAN = device_MA[:, :, None] == jnp.arange(degree)[None, None, :]
    first_MAN = chosen_MAN & (jnp.cumsum(chosen_MAN, axis=1) == 1)
    rows_to, row_of_choice = packed(first_MAN.reshape(-1, degree), nowhere=packed_rows)
    choices_at, place_of_choice = packed(chosen_MAN.reshape(-1, degree), nowhere=experts.size)
    choice_of_row = inverse(row_of_choice, size=packed_rows)
    token_of_row = choice_of_row // experts.shape[1]
    device_of_row = device_MA.reshape(-1).at[choice_of_row].get(mode="fill", fill_value=0)
    number_RA = experts.at[token_of_row].get(mode="fill", fill_value=-1)
    number_RA = number_RA - (device_of_row * experts_here)[:, None]
    is_there = (number_RA >= 0) & (number_RA < experts_here)
    return Sent(
        token_of_row=token_of_row,
        row_of_choice=row_of_choice.reshape(experts.shape),
        numbers_of_row=jnp.where(is_there, number_RA + 1, 0),
        place_of_choice=place_of_choice,
        sizes=jnp.stack([rows_to, choices_at]),
    )


def packed(goes: Bool[Array, "R N"], *, nowhere: int) -> tuple[Int[Array, " N"], Int[Array, " R"]]:
    """Return how many go to each peer, and the place of each among all, packed by peer.

    Args:
        goes: whether each goes to each peer; none goes to two.
        nowhere: the place of one that goes to no peer.
    """
    sizes = goes.sum(axis=0, dtype=jnp.int32)
    heads = jnp.cumsum(sizes) - sizes
    places = heads[None, :] + jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    place = jnp.where(goes, places, 0).sum(axis=1)
    return sizes, jnp.where(goes.any(axis=1), place, nowhere)


class Received(NamedTuple):
    """What a device is sent.

    Attributes:
        rows: tokens of each device at the head of its block, then zeros [N M D].
        numbers: for each choice of a row 1 + the expert's number here; 0 where it is elsewhere,
            and in rows that hold no token.
        choice_runs: the runs in which outputs go home.
    """

    rows: Float[Array, "N M D"]
    numbers: Int[Array, "N M A"]
    choice_runs: Runs


def dispatch(tokens: Float[Array, "M D"], sent: Sent, out: Exchange) -> Received:
    """Bring each token to the devices of its experts, bit for bit, with its experts' numbers."""
    row_runs, choice_runs = announce(sent.sizes, axis=out.axis)
    rows = moved(tokens, sent.token_of_row, sent.row_of_choice)
    return Received(
        rows=out.there(rows, row_runs),
        numbers=out.there(sent.numbers_of_row, row_runs),
        choice_runs=choice_runs,
    )


def by_sender(
    outputs: Float[Array, "S D"], tiles: Tiles, made: Bool[Array, "N M A"], *, longest_run: int
) -> Float[Array, "N L D"]:
    """Return outputs in the blocks in which they go home: each device's in its choices' order.

    Args:
        outputs: as they stand in the tiles.
        tiles: where they stand.
        made: whether each choice was made here.
        longest_run: room of a block.
    """
    made_NC = made.reshape(len(made), -1)
    heads = jnp.arange(len(made))[:, None] * longest_run
    num_places = len(made) * longest_run
    place_NC = heads + jnp.cumsum(made_NC, axis=1, dtype=jnp.int32) - 1
    place_of_choice = jnp.where(made_NC, place_NC, num_places).reshape(-1)
    choice_of_place = inverse(place_of_choice, size=num_places)
    slots = tiles.slot_of_choice.at[choice_of_place].get(mode="fill", fill_value=tiles.num_slots)
    places = place_of_choice.at[tiles.choice_of_slot].get(mode="fill", fill_value=num_places)
    return moved(outputs, slots, places[:, None]).reshape(len(made), longest_run, -1)
