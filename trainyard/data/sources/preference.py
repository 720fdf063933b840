"""Pairs of answers to a prompt, of which one is preferred: records that the tokenizer's chat template renders."""

from typing import TYPE_CHECKING

from trainyard.core.errors import UserError
from trainyard.data.sources.chat import PAD_TOKEN, ChatSource

if TYPE_CHECKING:
    from pathlib import Path

    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.remote.chunks.remote_path import RemoteFiles


class PreferenceSource(ChatSource):
    has_pairs = True
    losses = ("pairs",)
    inspector = ""

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.config.preference_schema import scores_ends
        from trainyard.data.loading.packing import PairSamples

        data, most = config.data, config.model.max_positions
        pairs = self.documents(config, paths, remote)
        if (longest := pairs.longest_answer()) > most:
            raise UserError(
                f"data.paths: an answer has {longest} tokens with its prompt, but model.max_positions={most}; "
                f"nearest: {longest}"
            )
        return PairSamples(pairs, data.seq_len, PAD_TOKEN, data.packing, scores_ends(config)), None

    def recognizes(self, path: "Path") -> bool:
        return False


SOURCE = PreferenceSource()
