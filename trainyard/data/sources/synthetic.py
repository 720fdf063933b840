"""Samples that are functions of their index, for trials and benchmarks."""

from typing import TYPE_CHECKING

from trainyard.data.source import DataSource

if TYPE_CHECKING:
    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles


class SyntheticSource(DataSource):
    reads_files = needs_paths = False
    has_fixed_length = True
    losses = ("causal_lm", "bert_pretraining", "pairs", "prompts")

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.config.preference_schema import sample_kind
        from trainyard.config.registries import OBJECTIVES
        from trainyard.data.loading.synthetic import (
            SyntheticAnswers,
            SyntheticPairs,
            SyntheticSentencePairs,
            SyntheticTokens,
        )
        from trainyard.families import family_of

        arguments = config.data, config.model.vocab, config.train.seed
        if config.train.objective and OBJECTIVES.find(config.train.objective).samples == "pairs":
            kind = sample_kind(config)
            if kind.unpaired:
                return SyntheticAnswers(*arguments, kind.mismatches), None
            return SyntheticPairs(*arguments, kind.scores_ends), None
        samples = SyntheticTokens if family_of(config.model).is_causal else SyntheticSentencePairs
        return samples(*arguments), None

    def files(self, data: "DataSection", remote: "RemoteFiles | None") -> "list[DataPath]":
        return []


SOURCE = SyntheticSource()
