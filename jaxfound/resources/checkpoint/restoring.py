"""Which checkpoint all processes restore, and how: offered, chosen, verified, read, compared.

Every process says what its own disk has; process 0 says what all can see. All go through the same
list, newest first, and vote after each stage, so that no process reads what another has found to
be damaged, and none waits for one that has given up.
"""

# JAX's own annotations name types that a checker cannot resolve (Device, PyTreeDef, key entries).
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, cast

import jax

from jaxfound.resources.checkpoint import choose, database, fingerprint, remote, steps
from jaxfound.resources.checkpoint import manifest as manifests
from jaxfound.resources.checkpoint.choose import Candidate
from jaxfound.resources.checkpoint.database import Source
from jaxfound.resources.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    describe_error,
)
from jaxfound.resources.checkpoint.leaves import (
    AbstractLeaf,
    LeafPath,
    check_fits,
    describe,
    flatten,
    unwrap_abstract,
    wrap,
)
from jaxfound.resources.checkpoint.manifest import Key, Manifest
from jaxfound.resources.checkpoint.saving import SLOW_S, Storage
from jaxfound.resources.checkpoint.shards import needed
from jaxfound.resources.checkpoint.sums import find_damage
from jaxfound.resources.checkpoint.tiers import COPIES, STATE, LocalTier, Tiers
from jaxfound.resources.control import ControlPlane
from jaxfound.resources.failpoint import reach

log = logging.getLogger(__name__)

type Table = Mapping[LeafPath, AbstractLeaf]


type Unread = Literal["refuse", "allow"]


class Found(NamedTuple):
    """A checkpoint as this process reads it."""

    directory: Path
    manifest: Manifest


class Loaded(NamedTuple):
    """A restored state and the manifest that it came with."""

    state: object
    manifest: Manifest


@dataclass
class Restorer:
    """Finds and reads the checkpoints of one run.

    Attributes:
        directory: the run's own, shared by all hosts.
        storage: reads whole checkpoints where one process has all devices.
        tiers: what else there is.
        local: this host's disk, if the run uses it.
        plane: this process among those of the job.
        damaged: steps of the shared tier that were found damaged.
    """

    directory: Path
    storage: Storage
    tiers: Tiers
    local: LocalTier | None
    plane: ControlPlane
    damaged: set[int] = field(default_factory=set[int])
    _here: dict[Key, Found] = field(default_factory=dict[Key, Found])

    def candidates(self, table: Table | None = None) -> tuple[Candidate, ...]:
        """Return what all processes could restore, the best first; nothing is verified.

        Args:
            table: what is asked for; a part on a local disk must have all that its process needs of
                it. None: every part counts.
        """
        self._here = self._local_parts(table)
        mine: dict[str, list[Key]] = {"local": list(self._here), "shared": [], "remote": []}
        if self.plane.is_first:
            mine["shared"] = [self._shared_key(step) for step in steps.committed(self.directory)]
            mine["remote"] = list(remote.committed(self.tiers.remote))
        told = self.plane.gather("checkpoint/offers", json.dumps(mine))
        offers = [cast(dict[str, list[list[object]]], json.loads(text)) for text in told]
        return choose.order(
            local=[_keys(offer["local"]) for offer in offers],
            shared=_keys(offers[0]["shared"]),
            remote=_keys(offers[0]["remote"]),
        )

    def find(self, candidate: Candidate) -> Found:
        """Return the checkpoint with its manifest; a remote one is fetched to the shared tier.

        Raises:
            DamagedCheckpointError: if there is no such, or its manifest is damaged.
        """
        if candidate.tier == "local":
            return self._here[candidate.key]
        step = candidate.key.step
        return Found(self.directory / str(step), manifests.read_step(self.directory, step))

    def damage(self, candidate: Candidate) -> str:
        """Return what any process found wrong with the files of `candidate`; empty when nothing."""
        if candidate.tier == "remote":
            fault = self._agreed("fetch", self._fetch(candidate) if self.plane.is_first else "")
            if fault:
                return fault
        return self._agreed("verify", self._own_damage(candidate))

    def first_good(
        self, candidates: tuple[Candidate, ...], reasons: list[str] | None = None
    ) -> Candidate | None:
        """Return the first whose files are intact; what is passed over is added to `reasons`.

        Raises:
            DamagedCheckpointError: if there is none, but there were some to try.
        """
        reasons = [] if reasons is None else reasons
        for candidate in candidates:
            damage = self.damage(candidate)
            if not damage:
                return candidate
            self._pass_over(candidate, damage, reasons)
        if reasons:
            raise DamagedCheckpointError(
                f"every checkpoint in {self.directory} is damaged. " + ". ".join(reasons) + ". "
                "Bring back a copy, or move the directory away to start from step 0"
            )
        return None

    def restore(self, candidate: Candidate, *, like: object, unread: Unread) -> Loaded:
        """Return the state of `candidate`; errors are those of the manager's `restore`."""
        self._check_fits(candidate, like=like, unread=unread)
        damage = self.damage(candidate)
        if damage:
            step = candidate.key.step
            self.damaged.add(step)
            others = [other for other in steps.committed(self.directory) if other != step]
            raise DamagedCheckpointError(
                f"step {step} is damaged: {damage}. Restore another of {others}, or bring back a "
                "copy"
            )
        return self._load(candidate, like=like)

    def latest(self, *, like: object, unread: Unread) -> Loaded | None:
        """Return the newest state that is whole and intact; errors: the manager's."""
        left = self.candidates(flatten(like))
        reasons: list[str] = []
        while True:
            found = self.first_good(left, reasons)
            if found is None:
                return None
            self._check_fits(found, like=like, unread=unread)
            try:
                return self._load(found, like=like)
            except DamagedCheckpointError as error:
                self._pass_over(found, str(error), reasons)
            left = left[left.index(found) + 1 :]

    def _pass_over(self, candidate: Candidate, reason: str, reasons: list[str]) -> None:
        if candidate.tier == "shared":
            self.damaged.add(candidate.key.step)
        reasons.append(f"{candidate.name}: {reason}")
        fields = {"step": candidate.key.step, "tier": candidate.tier, "reason": reason}
        log.warning("checkpoint.damaged", extra=fields)

    def _check_fits(self, candidate: Candidate, *, like: object, unread: Unread) -> None:
        found = self.find(candidate)
        check_fits(
            found.manifest.leaves,
            describe(flatten(like)),
            where=f"checkpoint {found.directory}",
            allow_unread=unread == "allow",
        )

    def _load(self, candidate: Candidate, *, like: object) -> Loaded:
        """Read the leaves of `like` from a checkpoint that fits and is intact."""
        table = flatten(like)
        arrays = self._read(candidate, table)
        leaves = [arrays[path] for path in table]
        state = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
        fields = {"step": candidate.key.step, "tier": candidate.tier}
        log.info("checkpoint.restored", extra=fields)
        return Loaded(state, self.find(candidate).manifest)

    def _read(self, candidate: Candidate, table: Table) -> dict[LeafPath, jax.Array]:
        """Return the leaves of `table`, as they were when they were saved.

        Raises:
            DamagedCheckpointError: on all processes, if one could not read or has other numbers.
        """
        reach("restore")
        found = self.find(candidate)
        arrays: dict[LeafPath, jax.Array] = {}
        fault = ""
        try:
            arrays = self._arrays(found, table)
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = (
                f"its files are intact but cannot be read: {describe_error(error)}. Install the "
                "Orbax version that wrote it"
            )
        fault = self._agreed("read", fault)
        if not fault:
            differ = fingerprint.differing(
                fingerprint.Prints(arrays, when="on_read").read(), found.manifest.fingerprints
            )
            fault = self._agreed("compare", "; ".join(differ[:MAX_NAMED]))
        if fault:
            raise DamagedCheckpointError(fault)
        return arrays

    def _local_parts(self, table: Table | None) -> dict[Key, Found]:
        if self.local is None:
            return {}
        found: dict[Key, Found] = {}
        for path, manifest in self.local.parts():
            if table is None or self._has_all(manifest, table):
                found[manifest.key] = Found(path, manifest)
        return found

    def _has_all(self, manifest: Manifest, table: Table) -> bool:
        """Say whether a part has every box that this process needs of `table`."""
        part = manifest.part
        return part is not None and all(
            part.has(path, box)
            for path, leaf in table.items()
            for box in needed(unwrap_abstract(leaf), process=self.plane.process)
        )

    def _shared_key(self, step: int) -> Key:
        """Return the key of a committed step; one with a damaged manifest is found out later."""
        try:
            return manifests.read_step(self.directory, step).key
        except DamagedCheckpointError:
            return Key(step, "unreadable")

    def _own_damage(self, candidate: Candidate) -> str:
        """Return what this process finds wrong with its share of the files."""
        try:
            directory, manifest = self.find(candidate)
        except DamagedCheckpointError as error:
            return str(error)
        whole = candidate.tier != "local"
        share = slice(self.plane.process, None, self.plane.count) if whole else slice(None)
        return "; ".join(
            find_damage(directory, manifest.files, depth=self.tiers.verify, share=share)
        )

    def _fetch(self, candidate: Candidate) -> str:
        try:
            remote.pull(self.tiers.remote, candidate.key.step, into=self.directory)
        except (OSError, CheckpointError) as error:
            return describe_error(error)
        return ""

    def _arrays(self, found: Found, table: Table) -> dict[LeafPath, jax.Array]:
        targets = {path: unwrap_abstract(leaf) for path, leaf in table.items()}
        part, state = found.manifest.part, found.directory / STATE
        if part is not None:
            own = Source(state / f"{database.PROCESS}{part.process}", part.owned)
            arrays = database.read_arrays(
                [own, Source(found.directory / COPIES, part.copies)], targets
            )
        elif jax.process_count() > 1:
            arrays = database.read_arrays([Source(state)], targets)
        else:
            arrays = self.storage.read(state, targets)
        return {path: wrap(arrays[path], like=leaf) for path, leaf in table.items()}

    def _agreed(self, stage: str, fault: str) -> str:
        """Return the faults of all processes, each with its process's number if there are more."""
        votes = self.plane.gather(f"checkpoint/{stage}", fault, timeout_s=SLOW_S)
        if len(votes) == 1:
            return fault
        return "; ".join(f"process {p}: {text}" for p, text in enumerate(votes) if text)


# Leaves named in one message.
MAX_NAMED = 8


def _keys(found: list[list[object]]) -> list[Key]:
    return [Key(cast(int, step), cast(str, attempt)) for step, attempt in found]
