"""A target's chat template, which no text can break out of."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import UnsupportedTargetError

Message = Mapping[str, str]


class ChatTemplate:
    """The tokens that ``tokenizer``'s chat template makes of a conversation.

    ``name`` is the target's, for errors; ``arguments`` are passed to the template. For one thread
    at a time.
    """

    def __init__(self, tokenizer: Any, name: str, arguments: Mapping[str, Any]) -> None:
        self._tokenizer, self._name, self._arguments = tokenizer, name, dict(arguments)
        added = tokenizer.added_tokens_decoder.values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def __call__(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's tokens, up to where the answer begins.

        The names of the target's special tokens are taken out of the contents: a text cannot end
        its own turn, or begin another's. Raises UnsupportedTargetError if there is no template.
        """
        if not self._tokenizer.has_chat_template:
            raise UnsupportedTargetError(
                f"{self._name} has no chat template: use generate() with a prompt"
            )
        prompt = self._tokenizer.apply_chat_template(
            [{k: self._plain_text(v) for k, v in message.items()} for message in messages],
            add_generation_prompt=True,
            **self._arguments,
        )
        return [int(token) for token in prompt]

    def _plain_text(self, text: str) -> str:
        # Again until none is left: taking one out can put another together.
        while (shorter := self._special.sub("", text)) != text:
            text = shorter
        return text
