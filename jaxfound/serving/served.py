"""What a server has to know of the model that it serves."""

from dataclasses import dataclass

from jaxfound.data.chat_template import ChatTemplate
from jaxfound.data.tokenizer import JsonTokenizer, Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """The model as its clients see it.

    Attributes:
        name: what requests call it.
        tokenizer: text to ids and back.
        start: ids before a prompt that is text.
        max_length: most tokens of prompt and continuation together.
        max_sequences: most continuations of one request, that is prompts x n.
        template: of chats, in place of the tokenizer's.
        created: when the weights were loaded, seconds since 1970.
    """

    name: str
    tokenizer: Tokenizer
    start: tuple[int, ...]
    max_length: int
    max_sequences: int = 64
    template: ChatTemplate | None = None
    created: int = 0

    @property
    def chat(self) -> ChatTemplate | None:
        """The template of chats, or None."""
        if self.template is None and isinstance(self.tokenizer, JsonTokenizer):
            return self.tokenizer.chat
        return self.template
