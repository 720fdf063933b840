"""The `data` section of the configuration."""

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from trainyard.config.registries import SOURCES
from trainyard.core.quantities import counted
from trainyard.core.section import ONE_OR_MORE, NameOrPath, Paths, PositiveInt, Section
from trainyard.core.user_code import is_user_path, nearest_name


class DataCacheSection(Section):
    """Local copies of the parts of remote data files (URLs in data.paths) that a run reads, shared by the ranks of a
    host and by later runs."""

    directory: str | None = None
    """Directory, preferably on a fast local disk of each host. Default: trainyard/data in the user's cache directory
    (XDG_CACHE_HOME or ~/.cache)."""
    gib: float = Field(64.0, ge=0.001)
    """Maximum size in GiB; what was used longest ago is removed. If it holds all of data.paths, each byte is read
    once."""


class ChatSection(Section):
    """Conversations to fine-tune on (data.source=chat): their format, the template that renders them, and what of them
    is trained."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "input_output"] = "auto"
    """Keys of the records; auto: recognized, record by record. prompt_completion as text, and input_output (NxD
    Training's), are tokenized without a template."""
    template: str | None = None
    """Chat template: a file with Jinja, or the Jinja itself. Default: that of data.tokenizer; without one, a line
    "role: content" per message, or ChatML for tokenizer=bytes."""
    train_on: Annotated[tuple[str, ...], Strict(False), ONE_OR_MORE, Field(min_length=1)] = ("assistant",)
    """What is trained: roles (assistant, user, system, tool, developer); completion: the last answer only; everything:
    every token. A message with `train: false` or `weight: 0` never is, with `train: true` always."""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """What happens to conversations of more than data.seq_len tokens; truncate: their end is cut off. How many were
    cut or dropped is printed."""

    @field_validator("train_on")
    @classmethod
    def _check_train_on(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        alone, known = ("completion", "everything"), ("assistant", "user", "system", "tool", "developer")
        for name in names:
            if name not in (*known, *alone):
                nearest = nearest_name(name, (*known, *alone)) or "; nearest: assistant"
                raise ValueError(f"{name} is not one of {', '.join((*known, *alone))}{nearest}")
            if name in alone and len(names) > 1:
                raise ValueError(f"{name} stands alone; nearest: train_on={name}")
        return names


class DataSection(Section):
    """Training samples: where they come from and how they are cut. Their order depends only on train.seed and the
    step."""

    source: Annotated[str, NameOrPath(registry=SOURCES)] = "text"
    """text: files that are tokenized in memory; tokens: Megatron's .bin and .idx; arrow: packed blocks; hdf5: masked
    sentence pairs (BERT); chat: conversations to fine-tune on; preference: pairs of answers (train.objective);
    synthetic: generated samples. A user function takes the configuration and returns a trainyard.Dataset, or one for
    training and one for validation; or name a trainyard.DataSource."""
    paths: Paths = ()
    """A file or glob, or a list of them; for source=tokens, names without .bin. Also URLs, such as s3://bucket/name,
    read through data.cache.directory. Default: a small built-in text, or built-in conversations (tokenizer=bytes
    only)."""
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Strict(False)] = ()
    """Blend weights, one per entry of data.paths. Default: all paths form one dataset."""
    order: Literal["shuffled", "megatron", "megatron-2023"] = "shuffled"
    """shuffled: by train.seed and step, without index files; megatron: the order of megatron-core 0.12 and later;
    megatron-2023: that of Megatron-LM until 2023, AWS's reference for Trainium and NeMo 1 (source=tokens)."""
    split: str | None = None
    """Documents for training, validation and test, such as 980,10,10 (source=tokens)."""
    mask_eod_loss: bool = False
    """Ignore the loss on the first token of each document: its context is the previous document (source=text or
    tokens)."""
    tokenizer: str = "bytes"
    """bytes, gpt2 (with vocab_file and merges_file), or a Hugging Face tokenizer.json: a path, a URL, or OWNER/NAME on
    the Hub."""
    vocab_file: str | None = None
    """GPT-2 vocab.json, for tokenizer=gpt2."""
    merges_file: str | None = None
    """GPT-2 merges.txt, for tokenizer=gpt2."""
    end_of_text: str | None = None
    """Token appended to each document. Default: the tokenizer's own (<|endoftext|>, </s>, ...)."""
    seq_len: PositiveInt = 1024
    """Tokens per sample."""
    validation_fraction: float = Field(0.0, ge=0, le=0.5)
    """Fraction of the samples held out for evaluation, 0 to 0.5; taken from the end."""
    document_mask: bool = False
    """Mask attention across document boundaries and restart positions in each document."""
    packing: bool = False
    """Fill each sample with as many whole documents as fit, which do not see each other (sources of documents, such as
    conversations). false: one document per sample, and padding."""
    buckets: Annotated[tuple[PositiveInt, ...], Strict(False)] = ()
    """Lengths that the samples of a step are padded to, such as [512, 1024, 2048]; each step takes the smallest that
    holds its documents. The last is data.seq_len. For sources of documents without data.packing. Default: only
    data.seq_len."""
    max_predictions: PositiveInt = 20
    """Maximum masked tokens per sample (BERT), at most data.seq_len."""
    chat: ChatSection = ChatSection()
    """Conversations, for source=chat."""
    cache: DataCacheSection = DataCacheSection()
    """Local copies of remote data files."""

    @property
    def separates_documents(self) -> bool:
        """Samples have `document_ids` and `position_ids`."""
        return self.document_mask or self.packing or self.has_flag("has_pairs")

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Every length that training batches have."""
        return self.buckets or (self.seq_len,)

    def has_flag(self, name: str) -> bool:
        """An attribute of the trainyard.DataSource; False for code of the user, which a configuration does not
        import."""
        return not is_user_path(self.source) and bool(getattr(SOURCES.find(self.source), name))

    @model_validator(mode="after")
    def _check_tokenizer_files(self) -> Self:
        if self.tokenizer == "gpt2" and not (self.vocab_file and self.merges_file):
            raise ValueError("tokenizer=gpt2: needs data.vocab_file and data.merges_file")
        return self

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        if not self.buckets:
            return self
        label = f"buckets={list(self.buckets)}"
        nearest = [*sorted({length for length in self.buckets if length < self.seq_len}), self.seq_len]
        if list(self.buckets) != nearest:
            raise ValueError(f"{label}: must increase up to data.seq_len={self.seq_len}; nearest: {nearest}")
        if self.packing:
            raise ValueError(f"{label}: data.packing=true fills all samples; nearest: []")
        if self.weights:
            raise ValueError(f"{label}: data.weights has an order of its own; nearest: []")
        if not is_user_path(self.source) and not self.has_flag("has_documents"):
            raise ValueError(f"{label}: data.source={self.source} has no samples of whole documents; nearest: []")
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.weights and len(self.weights) != len(self.paths):
            found = f"{counted(len(self.weights), 'weight')} for {len(self.paths)} data.paths"
            raise ValueError(f"weights={list(self.weights)}: {found}; give one per path")
        if self.has_flag("needs_paths") and not self.paths:
            raise ValueError(f"paths: missing; data.source={self.source} reads files")
        for key, default in (("order", "shuffled"), ("split", None)):
            if (value := getattr(self, key)) != default and not self.has_flag("has_document_order"):
                raise ValueError(f"{key}={value}: requires data.source=tokens; found {self.source}")
        if self.split and self.validation_fraction:
            raise ValueError(f"split={self.split}: data.validation_fraction holds out samples too; set only one")
        if self.validation_fraction and self.order != "shuffled":
            raise ValueError(
                f"validation_fraction={self.validation_fraction}: data.order={self.order} holds out documents; "
                "nearest: data.split=980,10,10"
            )
        if self.chat != ChatSection() and not is_user_path(self.source) and not self.has_flag("has_documents"):
            raise ValueError(f"chat: requires data.source=chat; found {self.source}")
        if self.has_flag("has_pairs") and self.chat.train_on != ("assistant",):
            raise ValueError(f"chat.train_on: data.source={self.source} compares answers; nearest: [assistant]")
        if self.has_flag("has_pairs") and self.chat.too_long == "truncate":
            raise ValueError(f"chat.too_long=truncate: data.source={self.source} compares whole answers; nearest: drop")
        if self.mask_eod_loss and not self.has_flag("marks_documents"):
            raise ValueError(f"mask_eod_loss=true: requires data.source=text or tokens; found {self.source}")
        if self.packing and not is_user_path(self.source) and not self.has_flag("has_documents"):
            raise ValueError(
                f"packing=true: data.source={self.source} cuts its samples from a stream of tokens; nearest: "
                "data.document_mask=true"
            )
        if self.document_mask and self.has_flag("has_documents"):
            raise ValueError("document_mask=true: samples are whole documents; nearest: data.packing=true")
        return self
