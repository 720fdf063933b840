"""The interface of data sources, built in or from outside the package: everything that the rest must know about one."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.families import ModelConfig
    from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles


class DataSource:
    """Where samples come from: a format of files, or a function of the user. `data.source` names an instance: by its
    name, or as `module:NAME`."""

    reads_files: bool = True
    """It reads data.paths, which may be URLs."""
    needs_paths: bool = True
    """data.paths may not be empty."""
    has_document_order: bool = False
    """data.order and data.split apply: it implements `open_in_order`."""
    marks_documents: bool = False
    """data.mask_eod_loss applies."""
    has_documents: bool = False
    """Samples are whole documents: `data.packing` applies, and `open` returns `packing.document_samples`."""
    has_pairs: bool = False
    """All samples are pairs of answers, which are documents of their own."""
    has_prompts: bool = False
    """Samples are prompts, whose answers the model writes."""
    makes_tokens: bool = False
    """data.tokenizer makes its tokens: the default (bytes) is a choice, too."""
    has_fixed_length: bool = False
    """Samples do not follow data.seq_len, so a smoke trial keeps it."""
    is_countable: bool = False
    """`plan` opens it to count samples: that is fast, and runs no code of the user."""
    losses: tuple[str, ...] = ("causal_lm",)
    """The losses of families (Family.loss) that it has samples for; `pairs` and `prompts`: those of
    `train.objective`."""
    unpacked_size: int = 1
    """Bytes of files and of what is unpacked from them, in bytes of the files."""
    inspector: str = ""
    """`module:function` (path, options, on_progress) -> InspectReport for `trainyard data inspect`."""

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        """The samples of these data.paths, and those that it holds out for validation itself. Validates the files.
        `remote` has the objects behind URLs."""
        raise NotImplementedError

    def open_in_order(self, config: "Config", remote: "RemoteFiles | None") -> "tuple[Dataset, Dataset | None]":
        """All of data.paths in data.order, which is not `shuffled`."""
        raise NotImplementedError

    def vocab_size(self, data: "DataSection", remote: "RemoteFiles | None") -> int | None:
        """The smallest model.vocab for data.paths; None: any."""
        return None

    def files(self, data: "DataSection", remote: "RemoteFiles | None") -> "list[DataPath]":
        """Every file that decides about the samples; a run that resumes finds them unchanged."""
        from trainyard.data.formats.documents import match_paths

        return [path for pattern in data.paths for path in match_paths(pattern) if path.is_file()]

    def model_files(self, data: "DataSection", model: "ModelConfig", generation: dict[str, Any]) -> dict[str, bytes]:
        """Files for the checkpoints of a run besides those of its tokenizer, by name. `generation` is the
        generation_config.json of the tokenizer."""
        return {}

    def recognizes(self, path: "Path") -> bool:
        """True if `inspector` describes this file or directory."""
        return False
