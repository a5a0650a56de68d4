"""Text into prepared bins: tokenise, cut, pack, write, publish."""

import hashlib
import json
import logging
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxfound.config.train import DataConfig
from jaxfound.data.bins import (
    FORMAT_VERSION,
    MANIFEST,
    ArrayFile,
    Manifest,
    Prepared,
    SplitCounts,
    open_prepared,
    sha256_of,
)
from jaxfound.data.documents import Dropped, Fault, read_documents, refuse_or_count
from jaxfound.data.errors import DataError
from jaxfound.data.packing import assign, choose_held_out, cut
from jaxfound.data.publish import publish, workspace
from jaxfound.data.source import SourceFile, find_files
from jaxfound.data.tokenizer import Tokenizer
from jaxfound.data.writer import write_split

log = logging.getLogger(__name__)

# All documents' ids, while their bins are being made.
SCRATCH = "scratch.bin"


@dataclass(frozen=True)
class Tokenised:
    """Every usable document as ids, one after the other.

    Attributes:
        tokens: all ids, bos and eos included.
        lengths: ids of each document, [N].
        hashes: of each document's text, uint64 [N].
        places: index of its file and line, [N 2].
        dropped: records left out, by reason.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    places: np.ndarray
    dropped: dict[str, Dropped]


def prepare(cfg: DataConfig, *, seq_len: int, tokenizer: Tokenizer) -> Prepared:
    """Return the bins that `cfg` describes, made if they are not there yet.

    The folder is published whole or not at all, under a name made of everything that decides its
    content; several processes may prepare the same thing at one time. A damaged folder is made
    anew.

    Args:
        cfg: sources, packing, share of held-out documents, place of the result.
        seq_len: slots of a bin.
        tokenizer: what turns text into ids.

    Raises:
        DataError: if a source is missing or damaged, no document is usable, too few documents are
            there to hold one out, or the result cannot be written.
    """
    files = find_files(cfg.source)
    key = content_key(cfg, files, seq_len=seq_len, tokenizer=tokenizer)
    final = Path(cfg.prepared_dir) / key
    ready = _open_whole(final)
    if ready is not None:
        return ready
    begin = time.perf_counter()
    try:
        with workspace(final) as work:
            manifest = _make(work, cfg, files=files, seq_len=seq_len, tokenizer=tokenizer)
            (work / MANIFEST).write_text(replace(manifest, key=key).to_json(), "utf-8")
            publish(work, final, is_whole=lambda path: _open_whole(path) is not None)
    except OSError as err:
        raise DataError(
            f"cannot write prepared data to {final}: {err}. Make room, or set data.prepared_dir to "
            "a folder that can be written"
        ) from err
    prepared = open_prepared(final)
    _log_prepared(prepared, time.perf_counter() - begin)
    return prepared


def content_key(
    cfg: DataConfig, files: tuple[SourceFile, ...], *, seq_len: int, tokenizer: Tokenizer
) -> str:
    """Return the hash of everything that decides the bins; names of files do not."""
    identity = {
        "format_version": FORMAT_VERSION,
        "files": [(file.kind, file.digest()) for file in files],
        "tokenizer": tokenizer.fingerprint,
        "seq_len": seq_len,
        "packing": cfg.packing,
        "eval_fraction": cfg.eval_fraction,
        "text_field": cfg.text_field,
        "on_bad_record": cfg.on_bad_record,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def tokenise(
    files: tuple[SourceFile, ...], cfg: DataConfig, *, tokenizer: Tokenizer, scratch: Path
) -> Tokenised:
    """Return every usable document as [bos] ids [eos]; the ids lie in the file `scratch`."""
    dtype = token_dtype(tokenizer.vocab_size)
    lengths, hashes, places = array("q"), array("Q"), array("q")
    dropped: dict[str, Dropped] = {}
    file_index = {file.name: i for i, file in enumerate(files)}
    documents = read_documents(
        files, text_field=cfg.text_field, on_bad_record=cfg.on_bad_record, dropped=dropped
    )
    with scratch.open("wb") as out:
        for document in documents:
            try:
                id_T = tokenizer.encode(document.text)
            except ValueError as err:
                fault = Fault("not encodable", str(err), "Change the text")
                place = f"{document.file}:{document.line}"
                refuse_or_count(fault, place=place, policy=cfg.on_bad_record, to=dropped)
                continue
            out.write(np.array([tokenizer.bos_id, *id_T, tokenizer.eos_id], dtype).tobytes())
            lengths.append(len(id_T) + 2)
            digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
            hashes.append(int.from_bytes(digest))
            places.extend((file_index[document.file], document.line))
    if not lengths:
        raise DataError(_nothing_usable(files, dropped))
    return Tokenised(
        tokens=np.memmap(scratch, dtype, "r"),
        lengths=np.array(lengths, np.int64),
        hashes=np.array(hashes, np.uint64),
        places=np.array(places, np.int64).reshape(-1, 2),
        dropped=dropped,
    )


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest of the two formats that holds every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _nothing_usable(files: tuple[SourceFile, ...], dropped: dict[str, Dropped]) -> str:
    left_out = "; ".join(
        f"{dropped[reason].count} left out ({reason}), the first at {dropped[reason].first_place}"
        for reason in sorted(dropped)
    )
    return (
        f"no usable document in {_names(files)}: {left_out or 'there is no line of text'}. "
        "Name a data.source that holds text"
    )


def _names(files: tuple[SourceFile, ...]) -> str:
    return ", ".join(file.name for file in files[:5]) + (" …" if len(files) > 5 else "")


def _make(
    work: Path,
    cfg: DataConfig,
    *,
    files: tuple[SourceFile, ...],
    seq_len: int,
    tokenizer: Tokenizer,
) -> Manifest:
    """Write every array into `work` and return what they are, the key apart."""
    text = tokenise(files, cfg, tokenizer=tokenizer, scratch=work / SCRATCH)
    counts = _write_splits(
        work, text, cfg=cfg, files=files, seq_len=seq_len, pad_id=tokenizer.pad_id
    )
    (work / SCRATCH).unlink()
    return Manifest(
        format_version=FORMAT_VERSION,
        key="",
        seq_len=seq_len,
        packing=cfg.packing,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        pad_id=tokenizer.pad_id,
        files=tuple(file.name for file in files),
        dropped=dict(sorted(text.dropped.items())),
        train=counts["train"],
        eval=counts.get("eval"),
        arrays=_describe_arrays(work),
    )


def _write_splits(
    work: Path,
    text: Tokenised,
    *,
    cfg: DataConfig,
    files: tuple[SourceFile, ...],
    seq_len: int,
    pad_id: int,
) -> dict[str, SplitCounts]:
    """Write the arrays of every split into `work`; return the counts of those that are there."""
    held_out = choose_held_out(text.hashes, fraction=cfg.eval_fraction)
    if held_out is None:
        raise DataError(
            f"data.eval_fraction={cfg.eval_fraction} holds documents out, but {_names(files)} has "
            f"{len(text.lengths)} usable document(s), {len(np.unique(text.hashes))} of them "
            "different: at least one must be held out and another left to train on. Add documents, "
            "or set data.eval_fraction=0"
        )
    np.save(work / "documents.npy", text.places)
    counts: dict[str, SplitCounts] = {}
    most_pieces = None
    for name, chosen in (("train", ~held_out), ("eval", held_out)):
        documents = np.flatnonzero(chosen)
        if documents.size:
            pieces = cut(text.lengths, documents=documents, seq_len=seq_len)
            bin_P = assign(
                pieces.length, seq_len=seq_len, packing=cfg.packing, most_pieces=most_pieces
            )
            # One program reads both splits: held-out rows are to need no more places.
            most_pieces = max(2, int(np.bincount(bin_P).max()))
            counts[name] = write_split(
                work / name,
                pieces=pieces,
                bin_of_piece=bin_P,
                tokens=text.tokens,
                lengths=text.lengths,
                seq_len=seq_len,
                pad_id=pad_id,
            )
    return counts


def _describe_arrays(work: Path) -> tuple[ArrayFile, ...]:
    return tuple(
        ArrayFile(str(path.relative_to(work)), path.stat().st_size, sha256_of(path))
        for path in sorted(work.rglob("*.npy"))
    )


def _open_whole(path: Path) -> Prepared | None:
    """Return the prepared data in `path`; None if there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        return open_prepared(path)
    except DataError as err:
        log.warning("data.damaged", extra={"path": str(path), "fault": str(err)})
        return None


def _log_prepared(prepared: Prepared, seconds: float) -> None:
    manifest = prepared.manifest
    log.info(
        "data.prepared",
        extra={
            "path": str(prepared.path),
            "documents": manifest.train.documents,
            "tokens": manifest.train.tokens,
            "dropped": sum(dropped.count for dropped in manifest.dropped.values()),
            "seconds": seconds,
        },
    )
    for remark in prepared.remarks():
        log.warning("data.short", extra={"remark": remark})
