"""The data room: text becomes tokens, tokens become bins, bins become batches."""

from jaxfound.data.batch import Batch
from jaxfound.data.bins import Bins, Manifest, Prepared, open_prepared
from jaxfound.data.errors import DataError
from jaxfound.data.loader import BinLoader
from jaxfound.data.prefetch import BatchStream
from jaxfound.data.prepare import prepare
from jaxfound.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile, load_tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "BinLoader",
    "Bins",
    "ByteTokenizer",
    "DataError",
    "Manifest",
    "Prepared",
    "Tokenizer",
    "TokenizerFile",
    "load_tokenizer",
    "open_prepared",
    "prepare",
]
