"""`jaxfound generate`: what is printed, and what a chat's options ask of the tokenizer."""

import pytest

from jaxfound.cli.main import main
from tests.data_room.test_chat import TURNS, tiny


class Echo:
    """Answers with the text of the prompt it was given, in pieces."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def stream(self, prompt, *, max_tokens, sampling):
        self.asked = prompt
        yield from (":smile: ", "[b]né[/b]")


@pytest.fixture
def echo(tmp_path, monkeypatch):
    made = Echo(tiny(tmp_path / "tokenizer", template="{{ bos_token }}" + TURNS))
    named = {}

    def load(run, *, step, tokenizer):
        named.update(run=run, step=step, tokenizer=tokenizer)
        return made

    monkeypatch.setattr("jaxfound.serving.load_generator", load)
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    made.named = named
    return made


def said(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["generate", *map(str, args)])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


def test_a_prompt_and_its_continuation_are_printed_as_they_are(echo, capsys):
    code, out, _ = said(capsys, "runs/a", "d0", "--tokenizer", "deepseek")
    assert (code, out) == (0, "d0:smile: [b]né[/b]\n")
    assert echo.asked == "d0"
    assert echo.named["tokenizer"] == "deepseek"


def test_a_chat_asks_with_ids_and_prints_the_answer_alone(echo, capsys):
    code, out, _ = said(capsys, "runs/a", "hi", "--chat", "--system", "Be brief.")
    assert (code, out) == (0, ":smile: [b]né[/b]\n")
    words = "<|im|>system\nBe brief.<|/im|>\n<|im|>user\nhi<|/im|>\n"
    assert echo.asked == [0, *echo.tokenizer.encode_marked(words).tolist()]


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers(echo, capsys, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content | upper }}")
    said(capsys, "runs/a", "hi", "--chat", "--template", tmp_path / "own.jinja")
    assert echo.asked == [0, *echo.tokenizer.encode("HI").tolist()]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--system", "x"), "--system and --template belong to a chat: add --chat"),
        (("--chat", "--template", "nowhere.jinja"), "nowhere.jinja"),
    ],
)
def test_options_that_cannot_be_followed_are_one_error(echo, capsys, args, message):
    code, out, err = said(capsys, "runs/a", "hi", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
