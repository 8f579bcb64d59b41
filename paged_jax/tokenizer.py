"""Text to token ids and back, and chat templates."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

# Imported late: who brings a model of their own, without text, needs neither.
if TYPE_CHECKING:
    import jinja2
    import tokenizers


class Tokenizer:
    """A checkpoint's tokenizer, its chat template and its special ids.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work.
        eos_token_ids: tokens that end a text.
        bos_token_id: the token that starts a text; None where there is none.
        chat_template: Jinja source; None where the checkpoint has none.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self.special_token_ids = frozenset(
            id_
            for id_, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._compiled_template: jinja2.Template | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: any text. Special tokens written out in it become their ids.
            add_special_tokens: whether to add what the checkpoint puts around a text,
                such as a start token. False for the output of `apply_chat_template`,
                which has its own.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the text that shows a conversation to the model.

        Args:
            messages: turns of a conversation, each with a "role" ("system", "user",
                "assistant") and "content".
            add_generation_prompt: whether to open the assistant's next turn.

        Raises:
            ValueError: the checkpoint has no chat template, or its template refuses
                these messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "This model has no chat template; give it plain text instead."
            )
        import jinja2

        try:
            if self._compiled_template is None:
                self._compiled_template = _compile(self.chat_template)
            return self._compiled_template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                bos_token=self._token(self.bos_token_id),
                eos_token=self._token(next(iter(self.eos_token_ids), None)),
            )
        except (jinja2.TemplateError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"The chat template failed: {reason}") from error

    def _token(self, id_: int | None) -> str:
        return "" if id_ is None else self.backend.id_to_token(id_) or ""


def _compile(template: str) -> "jinja2.Template":
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A template is code from a checkpoint: it runs in the sandbox. The block options,
    # filter and functions are those that templates are written against.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
