"""Prompts, whose completions the model writes and rewards judge: records that the tokenizer's chat template renders."""

from typing import TYPE_CHECKING, Any

from trainyard.data.sources.chat import ChatSource

if TYPE_CHECKING:
    from pathlib import Path

    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.families import ModelConfig
    from trainyard.remote.chunks.remote_path import RemoteFiles


class PromptSource(ChatSource):
    has_prompts = True
    losses = ("prompts",)
    inspector = ""

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.data.loading.prompt_samples import open_prompts

        room = config.data.seq_len - config.rollout.max_new_tokens
        return open_prompts(self.tokenized_data(config), paths, remote, config.model, room), None

    def model_files(self, data: "DataSection", model: "ModelConfig", generation: dict[str, Any]) -> dict[str, bytes]:
        """generation_config.json with the tokens that end answers, and the template if it is not the tokenizer's."""
        from trainyard.data.loading.conversation_samples import chat_spec
        from trainyard.data.loading.data_files import remote_files
        from trainyard.data.loading.prompt_samples import answer_ends
        from trainyard.data.text.chat_encoder import chat_encoder

        ends = answer_ends(data, remote_files(data), model)
        files = chat_encoder(chat_spec(data, model.new_tokens)).files()
        return {"generation_config.json": self.generation_config(generation, model, ends), **files}

    def recognizes(self, path: "Path") -> bool:
        return False


SOURCE = PromptSource()
