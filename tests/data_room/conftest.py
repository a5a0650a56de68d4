"""Prepared data in a test's own folder, from small files."""

import json

import pytest

from jaxfound.config.train import DataConfig
from jaxfound.data import ByteTokenizer, prepare


@pytest.fixture
def prepared_from(tmp_path):
    """Prepare `source` (a path, or texts to be written as jsonl) with bytes as tokens."""

    def make(source, *, seq_len=64, tokenizer=None, **keys):
        if isinstance(source, list):
            path = tmp_path / "texts.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in source), "utf-8")
            source = path
        names = tuple(map(str, source)) if isinstance(source, tuple) else str(source)
        keys = {"eval_fraction": 0.0, "prepared_dir": str(tmp_path / "prepared"), **keys}
        cfg = DataConfig(source=names, **keys)
        return prepare(cfg, seq_len=seq_len, tokenizer=tokenizer or ByteTokenizer())

    return make
