"""Answers to prompts, in pairs of which one is preferred, or each with a label, rendered by a chat template."""

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
        from trainyard.config.preference_schema import sample_kind
        from trainyard.data.loading.answers import Answers, AnswerSamples
        from trainyard.data.loading.packing import PairSamples

        data, most, kind = config.data, config.model.max_positions, sample_kind(config)
        records = self.documents(config, paths, remote, apart=kind.unpaired)
        longest, tokens = records.longest_answer()
        if tokens > most:
            raise UserError(
                f"{records.source(longest)}: an answer has {tokens} tokens with its prompt, but "
                f"model.max_positions={most}; nearest: {tokens}"
            )
        if kind.unpaired:
            answers = Answers(records, min(data.seq_len, most))
            return AnswerSamples(answers, data.seq_len, PAD_TOKEN, data.packing, kind.mismatches), None
        if not records.splits.all():
            place = records.source(int((records.splits == 0).argmax()))
            raise UserError(f"{place}: one answer; train.objective={config.train.objective} compares two; nearest: kto")
        return PairSamples(records, data.seq_len, PAD_TOKEN, data.packing, kind.scores_ends), None

    def recognizes(self, path: "Path") -> bool:
        return False


SOURCE = PreferenceSource()
