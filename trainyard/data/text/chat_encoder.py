"""Conversations as tokens, each with whether it is trained."""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Fast

from trainyard.core.errors import UserError
from trainyard.data.formats.conversations import Conversation, read_conversation
from trainyard.data.formats.preferences import LabeledAnswer, read_preference
from trainyard.data.text.chat_template import ChatTemplate
from trainyard.data.text.tokenizer import TokenizerSpec, add_new_tokens, model_tokenizer_files
from trainyard.data.text.trained_spans import SpecialTokens, TrainedText, trained_roles, trained_text

RENDERED_AT = datetime(2024, 7, 26)
"""The date for templates that write it, so that tokens depend on nothing but their record: the default of Llama 3.1's
template."""


class ChatSpec(NamedTuple):
    """What decides about the tokens of a conversation."""

    tokenizer: TokenizerSpec
    template: str | None
    """Jinja; None: the tokenizer's."""
    train_on: tuple[str, ...]
    format: str
    pairs: bool = False
    """Records are preferences: a document is the chosen answer with its prompt, and then the rejected one, or a single
    answer with its prompt."""


class EncodedConversation(NamedTuple):
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    """True for tokens that the model learns to write."""
    end_ids: frozenset[int]
    """The tokens that end its trained answers."""
    split: int = 0
    """Where the second conversation of a pair begins."""
    value: float = 0.0
    """What the record says of a pair, its margin; of a single answer, 1 if it is good."""


class ChatEncoder:
    def __init__(self, spec: ChatSpec) -> None:
        files = add_new_tokens(model_tokenizer_files(spec.tokenizer), spec.tokenizer.new_tokens)
        if "tokenizer.json" not in files:
            name = spec.tokenizer.name
            raise UserError(
                f"data.tokenizer={name}: conversations need a tokenizer.json, which tells where in a text "
                "a token is; transformers' save_pretrained writes one"
            )
        self.spec, self.fast = spec, Fast.from_buffer(files["tokenizer.json"])
        self.fast.no_padding()
        self.fast.no_truncation()
        template = ChatTemplate.from_files(files)
        if spec.template is not None:
            template = ChatTemplate(spec.template, template.special_tokens)
        self.template = template
        bos = template.special_tokens.get("bos_token")
        added = self.fast.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        eos = spec.tokenizer.end_token or template.special_tokens.get("eos_token")
        self.eos = None if eos is None else self.fast.token_to_id(eos)
        self.special = SpecialTokens({*(added[number].content for number in self.special_ids), eos or ""}, bos)
        # What the tokenizer puts before every text: BOS, for text without a template.
        encoded = self.fast.encode("", add_special_tokens=True).ids
        self.prefix = encoded[:-1] if encoded and encoded[-1] == self.eos else encoded

    def files(self) -> dict[str, bytes]:
        """The template, if it is not the tokenizer's: a checkpoint answers with the one that it was trained on."""
        return {} if self.spec.template is None else {"chat_template.jinja": self.template.text.encode()}

    def encode_record(self, record: Mapping[str, Any]) -> EncodedConversation:
        """Raises UserError with the reason if the record cannot be trained on."""
        if not self.spec.pairs:
            return self.encode(read_conversation(record, self.spec.format))
        pair = read_preference(record)
        if isinstance(pair, LabeledAnswer):
            return self.encode(pair.answer)._replace(value=float(pair.is_good))
        chosen, rejected = self.encode(pair.chosen), self.encode(pair.rejected)
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise UserError("chosen and rejected are the same")
        tokens = np.concatenate((chosen.tokens, rejected.tokens))
        trained = np.concatenate((chosen.trained, rejected.trained))
        trained[len(chosen.tokens)] = False  # the first token of an answer without a prompt follows nothing
        return EncodedConversation(tokens, trained, chosen.end_ids, len(chosen.tokens), pair.margin)

    def encode(self, conversation: Conversation) -> EncodedConversation:
        """Raises UserError with the reason if the conversation cannot be trained on."""
        if not conversation.messages:
            prompt, completion = conversation.prompt, conversation.completion
            text = TrainedText(prompt + completion, [(len(prompt), len(prompt + completion))], set(), True)
            return self._encode(text, self.prefix)
        by_role = trained_roles(self.spec.train_on, conversation.messages)
        trained = [role if own is None else own for role, own in zip(by_role, conversation.trained, strict=True)]
        marked = self.template.render_marked(conversation.messages, False, conversation.tools, RENDERED_AT)
        return self._encode(trained_text(self.template, marked, conversation.messages, trained, self.special), [])

    def _encode(self, rendered: TrainedText, prefix: list[int]) -> EncodedConversation:
        encoding = self.fast.encode(rendered.text, add_special_tokens=False)
        tokens = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        trained = np.zeros(len(tokens), np.bool_)
        everything = self.spec.train_on == ("everything",)
        for start, stop in [(0, len(rendered.text))] if everything else rendered.spans:
            inside = (offsets[:, 1] > start) & (offsets[:, 0] < stop)
            # A special token may take the white space around it, which is then part of the answer or of the header.
            for index in np.flatnonzero(inside & (offsets[:, 0] < start)).tolist():
                inside[index] = tokens[index] not in self.special_ids
            trained |= inside
        ends = frozenset(number for each in rendered.ends if (number := self.fast.token_to_id(each)) is not None)
        if rendered.needs_end:
            if self.eos is None:
                raise UserError(
                    "nothing ends an answer: the template writes no token after it, and the tokenizer has no "
                    "end-of-text token; set data.end_of_text"
                )
            tokens, trained = np.append(tokens, np.int32(self.eos)), np.append(trained, True)
            ends |= {self.eos}
        if prefix and tokens[: len(prefix)].tolist() != prefix:
            tokens = np.concatenate((np.array(prefix, np.int32), tokens))
            trained = np.concatenate((np.full(len(prefix), everything), trained))
        if not trained[1:].any():  # the first token is no label
            raise UserError("no trained token: no message of a role in data.chat.train_on is in the text")
        return EncodedConversation(tokens, trained, ends)


def read_template(template: str | None) -> str | None:
    """The Jinja of data.chat.template, which is a file or the Jinja itself."""
    if template is None or "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError(f"data.chat.template={template}: {reason}; expected a file with Jinja, or Jinja") from None


@cache
def chat_encoder(spec: ChatSpec) -> ChatEncoder:
    """Loaded once per process."""
    return ChatEncoder(spec)
