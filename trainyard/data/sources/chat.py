"""Conversations to fine-tune on: records that the tokenizer's chat template renders, with a mask of what is trained."""

import json
from typing import TYPE_CHECKING, Any

from trainyard.core.errors import UserError
from trainyard.data.source import DataSource

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.conversation_samples import ConversationSamples
    from trainyard.data.loading.dataset import Dataset
    from trainyard.families import ModelConfig
    from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles


class ChatSource(DataSource):
    needs_paths = False
    makes_tokens = has_documents = True
    inspector = "trainyard.prepare.inspect_chat:inspect_chat"

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.data.loading.packing import document_samples

        return document_samples(self.documents(config, paths, remote), config.data, PAD_TOKEN), None

    def documents(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None", apart: bool = False
    ) -> "ConversationSamples":
        from trainyard.data.loading.conversation_samples import open_conversations

        return open_conversations(
            self.tokenized_data(config), paths, remote, config.model.vocab, config.model.new_tokens, apart
        )

    def tokenized_data(self, config: "Config") -> "DataSection":
        """The section, whose tokenizer is that of the model."""
        data, weights = config.data, config.checkpoint.weights_from
        if weights and "tokenizer" not in data.model_fields_set:  # the default knows no special token of the model
            raise UserError(f"data.tokenizer: missing; the run starts from other weights; nearest: {weights}")
        return data

    def vocab_size(self, data: "DataSection", remote: "RemoteFiles | None") -> int:
        """The tokenizer's."""
        from trainyard.data.loading.text_stream import tokenizer_spec
        from trainyard.data.text.tokenizer import load_tokenizer

        return load_tokenizer(tokenizer_spec(data, ())).vocab_size

    def files(self, data: "DataSection", remote: "RemoteFiles | None") -> "list[DataPath]":
        from pathlib import Path

        from trainyard.data.formats.documents import arrow_files
        from trainyard.data.loading.data_files import expand_directories, match_files, tokenizer_files

        paths = match_files(data.paths, directories=True, remote=remote)
        tokenizer = tokenizer_files(data)
        beside = [path.with_name(name) for path in tokenizer[-1:] for name in TEMPLATE_FILES]
        named = [Path(data.chat.template).expanduser()] if data.chat.template and "{" not in data.chat.template else []
        return [*expand_directories(paths, arrow_files), *tokenizer, *filter(Path.is_file, (*beside, *named))]

    def model_files(self, data: "DataSection", model: "ModelConfig", generation: dict[str, Any]) -> dict[str, bytes]:
        """generation_config.json with the tokens that end answers, and the template if it is not the tokenizer's."""
        from trainyard.data.loading.conversation_samples import chat_spec, open_conversations
        from trainyard.data.loading.data_files import remote_files
        from trainyard.data.text.chat_encoder import chat_encoder

        lenient = data.chat.model_copy(update={"too_long": "truncate"})
        data = data.model_copy(update={"chat": lenient, "seq_len": 1 << 30})
        remote = remote_files(data)
        ends: dict[int, None] = {}
        for paths in [(path,) for path in data.paths] if data.weights else [data.paths]:
            ends |= dict.fromkeys(open_conversations(data, paths, remote, None, model.new_tokens).end_ids)
        files = chat_encoder(chat_spec(data, model.new_tokens)).files()
        return {"generation_config.json": self.generation_config(generation, model, ends), **files}

    def generation_config(self, generation: dict[str, Any], model: "ModelConfig", end_ids: "Iterable[int]") -> bytes:
        """generation_config.json with the tokens that end answers, before those that are known."""
        known = generation.get("eos_token_id") if model.eos_token_id is None else list(model.eos_token_id)
        ends = dict.fromkeys((*end_ids, *(known if isinstance(known, list) else [] if known is None else [known])))
        return (json.dumps({**generation, "eos_token_id": list(ends)}, indent=2) + "\n").encode()

    def recognizes(self, path: "Path") -> bool:
        from trainyard.data.formats.conversations import is_conversation_file

        return path.is_file() and is_conversation_file(path)


PAD_TOKEN = 0
"""Follows the documents of a sample. It has no label, and no token sees it."""
TEMPLATE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a tokenizer that decide about the text of a conversation."""
SOURCE = ChatSource()
