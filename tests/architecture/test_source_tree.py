"""The rulers of this folder measure what they say."""

import ast

import pytest

from tests.architecture.source_tree import nesting


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        ("return 1", 0),
        ("if a:\n  return 1\nelif b:\n  return 2\nelif c:\n  return 3\nelse:\n  return 4", 1),
        ("for i in a:\n  if i:\n    with i:\n      pass", 3),
        ("if a:\n  pass\nelse:\n  if b:\n    pass\n  return", 2),
        ("if a:\n  pass\nelif b:\n  for i in a:\n    pass", 2),
        ("try:\n  while a:\n    pass\nexcept ValueError:\n  if a:\n    pass", 2),
        ("def inner():\n  if a:\n    if b:\n      pass\nreturn inner", 0),
        ("return [x for x in a if x]", 0),
        ("match a:\n  case 1:\n    if b:\n      pass", 2),
    ],
)
def test_nesting_counts_blocks(body, depth):
    lines = "\n".join("  " + line for line in body.splitlines())
    function = ast.parse(f"def f(a, b, c):\n{lines}").body[0]
    assert nesting(function) == depth
