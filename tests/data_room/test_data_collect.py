import json

import pytest
from typer.testing import CliRunner

from jaxfound.cli.main import app
from jaxfound.config.load import load
from jaxfound.data import load_tokenizer, prepare
from jaxfound.data.collect import collect
from jaxfound.data.errors import DataError

FILES = {
    "b/two.py": b"print('two')\n",
    "a.py": "x = 'ä'\n".encode(),
    "c/again.py": b"print('two')\n",
    "blank.py": b" \n\n",
    "latin.py": "x = 'ä'".encode("latin-1"),
    ".hidden/no.py": b"no\n",
    "notes.txt": b"not asked for\n",
}


@pytest.fixture
def tree(tmp_path):
    for name, data in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "tree"


def records(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_each_text_is_a_record_once_in_the_order_of_paths(tree, tmp_path):
    out = tmp_path / "new" / "python.jsonl"
    found = collect(tree, out, pattern="*.py")
    assert records(out) == [
        {"path": "a.py", "text": "x = 'ä'\n"},
        {"path": "b/two.py", "text": "print('two')\n"},
    ]
    assert (found.documents, found.num_bytes) == (2, 9 + 13)
    assert found.left_out == {"blank": 1, "not UTF-8": 1, "a text that was taken": 1}
    assert [p.name for p in out.parent.iterdir()] == ["python.jsonl"]
    assert collect(tree, tmp_path / "other.jsonl", pattern="*.py").sha256 == found.sha256


@pytest.mark.parametrize(("most_bytes", "documents"), [(9, 1), (21, 1), (22, 2)])
def test_text_ends_before_the_file_that_goes_beyond_the_limit(
    most_bytes, documents, tree, tmp_path
):
    found = collect(tree, tmp_path / "x.jsonl", pattern="*.py", most_bytes=most_bytes)
    assert found.documents == documents
    assert found.num_bytes <= most_bytes


@pytest.mark.parametrize(
    ("out", "pattern", "words"),
    [
        ("x.txt", "*.py", "no .jsonl"),
        ("x.jsonl", "*.rs", "matches"),
        ("x.jsonl", "blank.*", "blan"),
    ],
)
def test_what_gives_no_documents_is_refused_and_what_was_there_stays(
    out, pattern, words, tree, tmp_path
):
    (tmp_path / out).write_text("before")
    with pytest.raises(DataError, match=words):
        collect(tree, tmp_path / out, pattern=pattern)
    assert (tmp_path / out).read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([out, "tree"])


def test_the_command_says_what_came_of_it_and_a_run_reads_it(tree, tmp_path):
    out = tmp_path / "python.jsonl"
    said = CliRunner().invoke(
        app, ["data", "collect", str(tree), "--pattern", "*.py", "--out", str(out)]
    )
    assert said.exit_code == 0, said.output
    assert "2 documents, 22 bytes" in said.output
    cfg = load(
        "configs/tiny-dense.yaml",
        [f"data.source={out}", f"data.prepared_dir={tmp_path / 'bins'}", "data.eval_fraction=0"],
    )
    prepared = prepare(cfg.data, seq_len=16, tokenizer=load_tokenizer("byte"))
    assert prepared.manifest.train.documents == 2
