"""The whole configuration: what a YAML file may say, with unit and range beside each field.

Checks that need no device and no rank count live here; those that need the number of ranks live in parallel/layout.py.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from trainyard.config.base import Section, nearest_multiples
from trainyard.config.model_schema import BertConfig, ModelSection, PositiveInt
from trainyard.devices.names import ATTENTION_KERNELS, DEVICE_NAMES

NonNegativeInt = Annotated[int, Field(ge=0)]
FunctionPath = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
"""`module:function`, imported when the run starts; the current directory is on the path."""


class DataSection(Section):
    """Where samples come from. Their order is a function of train.seed and the step alone."""

    source: Literal["text", "tokens", "arrow", "hdf5", "synthetic"] = "text"
    """text: files through a tokenizer, in memory; tokens: Megatron's .bin and .idx; arrow: packed blocks; hdf5: masked
    sentence pairs (BERT); synthetic: generated samples."""
    paths: Annotated[tuple[str, ...], Strict(False)] = ()
    """Files or globs; for tokens, names without .bin. None: a small text of our own (only with tokenizer=bytes)."""
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Strict(False)] = ()
    """Shares of a blend, one for each of data.paths; none: the paths are one set."""
    order: Literal["shuffled", "megatron"] = "shuffled"
    """shuffled: by train.seed and step, without index files; megatron: what Megatron-LM would see (source=tokens)."""
    split: str | None = None
    """Documents for training, validation and test, such as 980,10,10 (source=tokens)."""
    mask_eod_loss: bool = False
    """Do not predict what begins a document from the end of the one before (text and tokens)."""
    tokenizer: str = "bytes"
    """bytes, the path of a Hugging Face tokenizer.json, or gpt2 (with vocab_file and merges_file)."""
    vocab_file: str | None = None
    """GPT-2 vocab.json, for tokenizer=gpt2."""
    merges_file: str | None = None
    """GPT-2 merges.txt, for tokenizer=gpt2."""
    end_of_text: str | None = None
    """Token put after each document; default: the tokenizer's own (<|endoftext|>, </s>, ...)."""
    seq_len: PositiveInt = 1024
    """Tokens per sample."""
    validation_fraction: float = Field(0.0, ge=0, le=0.5)
    """Part of the samples held out for evaluation, 0 to 0.5; taken from the end."""
    document_mask: bool = False
    """Keep documents apart: attention does not cross their ends, and positions start anew in each."""
    max_predictions: PositiveInt = 20
    """Masked places per sample (BERT), at most data.seq_len."""

    @model_validator(mode="after")
    def _tokenizer_files(self) -> Self:
        if self.tokenizer == "gpt2" and not (self.vocab_file and self.merges_file):
            raise ValueError("tokenizer=gpt2: needs data.vocab_file and data.merges_file")
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.weights and len(self.weights) != len(self.paths):
            raise ValueError(f"weights: {len(self.weights)} for {len(self.paths)} data.paths; one for each")
        if self.source in ("tokens", "arrow", "hdf5") and not self.paths:
            raise ValueError(f"paths: missing; source={self.source} reads files")
        for key, used in (("order", self.order != "shuffled"), ("split", self.split)):
            if used and self.source != "tokens":
                raise ValueError(f"{key}: only with source=tokens; source={self.source}")
        if self.split and self.validation_fraction:
            raise ValueError("split and validation_fraction: both hold samples out; keep one")
        if self.validation_fraction and self.order == "megatron":
            raise ValueError("validation_fraction: order=megatron holds documents out; nearest: split=980,10,10")
        if self.mask_eod_loss and self.source not in ("text", "tokens"):
            raise ValueError(f"mask_eod_loss: only with source=text or tokens; source={self.source}")
        return self


class TrainSection(Section):
    """How long, how much at a time, and by which loss."""

    steps: PositiveInt
    """Optimizer steps."""
    global_batch: PositiveInt = 8
    """Samples per optimizer step over all ranks."""
    micro_batch: PositiveInt = 1
    """Samples per forward pass on one rank."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Decides weights, sample order and dropout; 0 to 2^63 - 1."""
    loss: FunctionPath | None = None
    """Your own loss, `module:function`: takes (output, batch), gives (sum, count). Default: the family's."""
    max_skipped_steps: PositiveInt = 5
    """Steps in a row with a non-finite loss or gradient (each skipped) after which the run stops."""


class OptimizerSection(Section):
    """The update rule. Weight decay leaves out norms and biases, as each model's blueprint says."""

    kind: Literal["adamw", "lamb"] = "adamw"
    """adamw, or lamb (layer-wise trust ratio, for very large batches)."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment, 0 to below 1."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment, 0 to below 1."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    trust_clip: bool = False
    """lamb: never let the trust ratio exceed 1."""


class ScheduleSection(Section):
    """Learning rate over steps."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine and linear fall from the peak to the floor; constant stays; wsd stays, then falls linearly at the end."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from 0."""
    decay_steps: PositiveInt | None = None
    """cosine, linear: step at which the floor is reached; wsd: length of the final fall. Default: train.steps (wsd: a
    tenth of it)."""
    min_lr: float = Field(0.0, ge=0)
    """Lowest learning rate after the warm-up (absolute, not a fraction)."""


class PrecisionSection(Section):
    """In which numbers the run computes."""

    kind: Literal["fp32", "bf16", "bf16_sr", "fp8"] = "fp32"
    """fp32; bf16: bf16 compute with fp32 master weights; bf16_sr: bf16 weights updated with stochastic rounding;
    fp8: as bf16, but the matrix products of blocks multiply in 8 bits. Optimizer state is fp32 in all of them."""
    grad_dtype: Literal["fp32", "bf16"] | None = None
    """In what gradients are summed over micro batches. Default: bf16 for bf16_sr, else fp32."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """In what gradients are summed over data parallel ranks. Default: as precision.grad_dtype."""
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    """fp8: one scale for a tensor, or one for each row (slower, less is lost where rows differ much)."""
    fp8_backward: Literal["e5m2", "bf16"] = "e5m2"
    """fp8: what gradients are multiplied as; weights and activations are e4m3."""
    bf16_first_layers: NonNegativeInt = 0
    """fp8: so many of the first blocks stay in bf16. The embedding always does."""
    bf16_last_layers: NonNegativeInt = 0
    """fp8: so many of the last blocks stay in bf16."""
    head_dtype: Literal["bf16", "fp8"] = "bf16"
    """fp8: how the output head multiplies."""

    @property
    def compute_dtype(self) -> str:
        return "fp32" if self.kind == "fp32" else "bf16"

    @property
    def grad_accum_dtype(self) -> str:
        return self.grad_dtype or ("bf16" if self.kind == "bf16_sr" else "fp32")

    @property
    def grad_reduce_dtype(self) -> str:
        return self.reduce_dtype or self.grad_accum_dtype

    @model_validator(mode="after")
    def _gradients_fit(self) -> Self:
        if self.kind == "fp32" and self.grad_dtype == "bf16":
            raise ValueError("grad_dtype=bf16: with kind=fp32 gradients are fp32; nearest: grad_dtype=fp32")
        own = {
            "fp8_scaling": "tensor",
            "fp8_backward": "e5m2",
            "bf16_first_layers": 0,
            "bf16_last_layers": 0,
            "head_dtype": "bf16",
        }
        for name, default in own.items():
            if self.kind != "fp8" and getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)}: goes with kind=fp8; nearest: kind=fp8")
        return self


class LayoutSection(Section):
    """How the model and the batch are spread over ranks. Data parallel takes what is left: ranks / (tp * pp * cp)."""

    tp: PositiveInt = 1
    """Tensor parallel ranks."""
    sequence_parallel: bool = False
    """Split activations over the tp ranks between the parts of a block."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    vpp: PositiveInt = 1
    """Virtual stages per pipeline rank (interleaved schedule)."""
    pipeline_cuts: Annotated[tuple[int, ...], Strict(False)] = ()
    """Last layer of each pipeline stage but the last one; default: even stages."""
    pipeline_schedule: Literal["1f1b", "zero_bubble", "zbv"] = "1f1b"
    """Order of micro batches in the pipeline. 1f1b: one forward, one backward (interleaved with vpp above 1);
    zero_bubble: backward in two halves, the weights' half fills the gaps; zbv: the same with two stages a rank, placed
    in a V (needs vpp=2)."""
    cp: PositiveInt = 1
    """Context parallel ranks (the sequence is split)."""
    cp_method: Literal["ring", "all_gather"] = "ring"
    """How context parallel ranks see each other's keys and values: sent round piece by piece, or gathered once; on
    Trainium always gathered."""
    zero: int = Field(0, ge=0, le=3)
    """What data parallel ranks share out: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    bucket_mib: PositiveInt = 256
    """MiB of gradients that data parallel ranks sum at a time, while the backward pass goes on."""
    ranks: PositiveInt | None = None
    """Ranks the file was written for. Default: whatever the run has."""

    @model_validator(mode="after")
    def _cuts_match(self) -> Self:
        stages = self.pp * self.vpp
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp}: virtual stages need pp above 1; nearest: 1")
        if self.pipeline_schedule != "1f1b" and self.zero >= 2:
            raise ValueError(
                f"zero={self.zero}: sums gradients while backward goes, which pipeline_schedule={self.pipeline_schedule} takes apart; "
                "nearest: zero=1, or pipeline_schedule=1f1b"
            )
        if self.pipeline_schedule == "zbv" and self.vpp != 2:
            raise ValueError(f"vpp={self.vpp}: pipeline_schedule=zbv has two stages a rank; nearest: 2")
        if self.pipeline_cuts and (
            len(self.pipeline_cuts) != stages - 1 or list(self.pipeline_cuts) != sorted(set(self.pipeline_cuts))
        ):
            raise ValueError(
                f"pipeline_cuts={list(self.pipeline_cuts)}: needs {stages - 1} rising layer numbers for pp={self.pp} x vpp={self.vpp}; "
                "nearest: leave it out for even stages"
            )
        return self


class RecomputeSection(Section):
    """Which activations are computed again in the backward pass instead of being kept."""

    kind: Literal["none", "attention", "selective", "full"] = "none"
    """none; attention: the core attention alone; selective: the modules named below; full: whole blocks."""
    modules: Annotated[
        tuple[Literal["core_attention", "attention", "mlp", "activation", "norm"], ...], Strict(False)
    ] = ()
    """With kind=selective: which modules of a block. `activation` is the SwiGLU or GELU between the MLP's matrices."""

    @model_validator(mode="after")
    def _parts_named(self) -> Self:
        if (self.kind == "selective") != bool(self.modules):
            raise ValueError(
                f"modules={list(self.modules)}: goes with kind=selective and needs at least one name, such as mlp"
            )
        return self


class CompileSection(Section):
    """torch.compile, block by block, of the loss and of the optimizer update."""

    enabled: bool = False
    """Compile (the first step takes longer, the others are faster). Needs a C++ compiler on a CPU."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """How hard the compiler searches."""
    cuda_graphs: bool = False
    """Record the work of a micro batch once and replay it, where the device can (CUDA graphs; one rank). For models so
    small that the host cannot keep up. Takes memory: what a recording used stays taken."""


class CheckpointSection(Section):
    """What the run starts from, what it keeps on the way, and what it leaves behind."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: none by steps. With this or minutes, one is written at the end of the run too, and
    when a signal ends it."""
    every_minutes: float = Field(0.0, ge=0)
    """Minutes between checkpoints; 0: none by the clock."""
    keep: NonNegativeInt = 3
    """Newest checkpoints that are kept; 0: all."""
    directory: str | None = None
    """Where they go: a path that all hosts share, or an fsspec URL such as s3://bucket/name. Default: checkpoints/ in
    the run directory."""
    resume: str = "none"
    """auto: go on from this run's newest whole checkpoint, or begin if there is none; or the path of one, or of a
    directory of them; none: begin."""
    weights_only: bool = False
    """Take the weights of checkpoint.resume and begin at step 0, with a fresh optimizer."""
    init_from: str | None = None
    """Weights that a run which begins starts from, in any form that `trainyard convert` reads (continued pre-training).
    Default: fresh weights."""
    blocking: bool = False
    """Wait until a checkpoint is written. Default: the steps go on meanwhile, with a copy of the state in host
    memory."""
    writers_per_host: PositiveInt | None = None
    """Ranks of a host that hold such a copy, and write, at a time; all but the last so many are waited for. Default:
    all at once."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What a run does when a checkpoint cannot be written (a full disk, say): say so and go on, or stop."""
    export_hf: bool = True
    """At the end write the weights in Hugging Face form (config.json, model.safetensors) to the run directory."""

    @property
    def saving_enabled(self) -> bool:
        return bool(self.every or self.every_minutes)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.weights_only and self.resume in ("auto", "none"):
            raise ValueError(f"weights_only: goes with the path of a checkpoint; resume={self.resume}")
        if self.weights_only and self.init_from:
            raise ValueError("init_from and weights_only: both bring weights; keep one")
        return self


class EvaluateSection(Section):
    """Loss on held-out samples during training."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: none. Needs data.validation_fraction above 0."""
    batches: PositiveInt = 8
    """Global batches per evaluation, at most."""
    function: FunctionPath | None = None
    """Your own evaluation, `module:function`: takes the trainer, gives {name: number}. Replaces the built-in one."""
    metrics: dict[str, FunctionPath] = Field(default_factory=dict)
    """Your own metrics by name, `module:function`: each takes (output, batch), gives (sum, count)."""


class LogSection(Section):
    """What is written where."""

    every: PositiveInt = 10
    """Steps between logged lines."""
    name: str = Field("run", pattern=r"^[\w.\-]+$")
    """Name of the run; its directory is log.directory/NAME."""
    directory: str = "runs"
    """Parent of run directories."""
    tensorboard: bool = True
    """Write TensorBoard files too."""


class DeviceSection(Section):
    """What to run on."""

    name: str = "auto"
    """auto takes the best device of this machine."""
    threads: PositiveInt | None = None
    """CPU threads for tensor work; default: torch's choice."""
    kernels: Literal["fused", "plain"] = "fused"
    """fused: the device's own kernels, where it has some; plain: torch's, to compare."""
    attention: str = "auto"
    """Attention kernel to try first, by the device's name for it; auto: the one that pays most."""
    lnc: Annotated[int, Field(ge=1, le=2)] | None = None
    """Trainium: physical cores that one rank drives. Default: 1 on trn1, 2 on trn2 and trn3."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time (slower on a GPU; a CPU always does)."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in DEVICE_NAMES:
            raise ValueError(f"not one of {', '.join(DEVICE_NAMES)}; nearest: {DEVICE_NAMES[0]}")
        return name

    @field_validator("attention")
    @classmethod
    def _some_device_has(cls, attention: str) -> str:
        if attention not in ATTENTION_KERNELS:
            raise ValueError(
                f"not one of {', '.join(ATTENTION_KERNELS)}; nearest: {ATTENTION_KERNELS[0]}"
            )
        return attention


class Config(Section):
    """One run, whole."""

    description: str = ""
    """One line for `trainyard recipes`."""
    hardware: str = ""
    """What hardware the file is meant for, in words."""
    model: ModelSection
    data: DataSection = DataSection()
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    layout: LayoutSection = LayoutSection()
    recompute: RecomputeSection = RecomputeSection()
    compile: CompileSection = CompileSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    log: LogSection = LogSection()
    device: DeviceSection = DeviceSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        model, data, train = self.model, self.data, self.train
        if train.global_batch % train.micro_batch:
            near = nearest_multiples(train.global_batch, train.micro_batch)
            raise ValueError(
                f"train.global_batch={train.global_batch}: not a multiple of train.micro_batch={train.micro_batch}; "
                f"nearest: {near}"
            )
        if data.seq_len > model.max_positions:
            raise ValueError(
                f"data.seq_len={data.seq_len}: longer than model.max_positions={model.max_positions}; "
                f"nearest: {model.max_positions}"
            )
        if isinstance(model, BertConfig):
            if data.document_mask:
                raise ValueError("data.document_mask=true: BERT's samples hold one pair each; nearest: false")
            if data.source not in ("hdf5", "synthetic"):
                raise ValueError(f"data.source={data.source}: BERT reads masked sentence pairs; nearest: hdf5")
            if data.max_predictions > data.seq_len - 3:
                raise ValueError(
                    f"data.max_predictions={data.max_predictions}: more than a sample of data.seq_len={data.seq_len} holds; "
                    f"nearest: {max(data.seq_len - 3, 1)}"
                )
        if self.layout.pipeline_schedule != "1f1b" and self.compile.enabled:
            raise ValueError(
                f"layout.pipeline_schedule={self.layout.pipeline_schedule}: takes the backward pass apart, which compiled blocks do not "
                "allow; nearest: 1f1b, or compile.enabled=false"
            )
        if self.layout.zero >= 2 and self.precision.kind == "bf16_sr" and self.precision.grad_accum_dtype == "fp32":
            raise ValueError(
                f"precision.grad_dtype=fp32: with layout.zero={self.layout.zero} gradients have the weights' dtype; "
                "nearest: bf16"
            )
        if self.precision.kind == "fp8":
            for name, size in (("hidden", model.hidden), ("ffn", model.ffn)):
                if size and size % 16:
                    near = nearest_multiples(size, 16)
                    raise ValueError(
                        f"model.{name}={size}: precision.kind=fp8 multiplies by 16 at a time; nearest: {near}"
                    )
            if self.precision.bf16_first_layers + self.precision.bf16_last_layers >= model.layers:
                raise ValueError(
                    f"precision.bf16_first_layers={self.precision.bf16_first_layers}: with bf16_last_layers={self.precision.bf16_last_layers} no "
                    f"block of {model.layers} is left for fp8; nearest: kind=bf16"
                )
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr={self.schedule.min_lr:g}: above optimizer.lr={self.optimizer.lr:g}; "
                f"nearest: {self.optimizer.lr:g}"
            )
        if self.evaluate.every and not (data.validation_fraction or data.split or self.evaluate.function):
            raise ValueError(
                f"evaluate.every={self.evaluate.every}: no samples are held out; set data.validation_fraction, say 0.05"
            )
        return self
