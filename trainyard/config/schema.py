"""The complete configuration: every section and key of a YAML file, with its unit and range.

Checks here need neither a device nor the number of ranks; those that do live in parallel/layout.py.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, SerializeAsAny, Strict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainyard.config.batch_invariance import check_batch_invariance
from trainyard.config.checkpoint_schema import CheckpointSection
from trainyard.config.data_schema import DataSection
from trainyard.config.layout_schema import LayoutSection
from trainyard.config.objective_check import check_objective
from trainyard.config.optimizer_schema import OptimizerSection, ScheduleSection
from trainyard.config.preference_schema import PreferenceSection
from trainyard.config.registries import LOGGERS, OBJECTIVES, SOURCES
from trainyard.config.rollout_schema import PolicySection, RolloutSection
from trainyard.core.errors import UserError
from trainyard.core.section import (
    ONE_OR_MORE,
    USER_PATH,
    FunctionPath,
    NameOrPath,
    NonNegativeInt,
    Paths,
    PositiveInt,
    Section,
    nearest_multiples,
    validate_at,
)
from trainyard.core.user_code import is_user_path, nearest_name
from trainyard.devices.registry import DEVICES, all_devices, device_aliases
from trainyard.families import ModelConfig, family_of, find_family
from trainyard.families.family import LOSSES


class TrainSection(Section):
    """Length of the run, batch sizes, seed and loss."""

    steps: PositiveInt
    """Optimizer steps."""
    global_batch: PositiveInt = 8
    """Samples per optimizer step over all ranks."""
    micro_batch: PositiveInt = 1
    """Samples per forward pass on one rank."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Seed of initial weights, sample order and dropout; 0 to 2^63 - 1."""
    loss: Annotated[str, NameOrPath(registry=LOSSES, example="my_module:my_function")] | None = None
    """A loss by name, a subclass of trainyard.Loss, or a user function, which takes (output, batch) and returns
    (sum, count). Default: the loss of the family."""
    objective: Annotated[str, NameOrPath(registry=OBJECTIVES, path="module:Class")] | None = None
    """What pairs of answers, or answers with a label, train (data.source=preference): dpo, simpo, cpo, orpo, kto,
    reward, with options in the section preference; or what completions of prompts train (data.source=prompts) that the
    model writes: grpo, rloo, with options in rollout and policy. Or a subclass of trainyard.PairLoss or
    PolicyLoss. Default: predict the next token."""
    embedding_noise: float = Field(0.0, ge=0)
    """Add noise to the embedded tokens while training (NEFTune): uniform, up to this number / sqrt(data.seq_len x
    model.hidden). 5 is usual for fine-tuning."""
    callbacks: Annotated[tuple[FunctionPath, ...], Strict(False), ONE_OR_MORE] = ()
    """User callbacks, `module:Class`: subclasses of trainyard.Callback, made without arguments on every rank."""
    max_skipped_steps: PositiveInt = 5
    """Number of consecutive steps with a non-finite loss or gradient, or without a counted label (each is skipped),
    after which the run stops."""


class PrecisionSection(Section):
    """Number formats of compute, gradients and reductions."""

    kind: Literal["fp32", "bf16", "bf16_sr", "fp8"] = "fp32"
    """fp32; bf16: bf16 compute with fp32 master weights; bf16_sr: bf16 weights updated with stochastic rounding;
    fp8: like bf16, with fp8 GEMMs in the transformer blocks. Optimizer state is always fp32."""
    grad_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype in which gradients are accumulated over micro batches. Default: bf16 for bf16_sr, else fp32."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype in which gradients are reduced over data parallel ranks. Default: precision.grad_dtype."""
    fp8_scaling: Literal["tensor", "row"] = "tensor"
    """fp8: one scale per tensor, or one per row (slower, more accurate if rows differ much in magnitude)."""
    fp8_backward: Literal["e5m2", "bf16"] = "e5m2"
    """fp8: format of gradients in backward GEMMs; weights and activations are e4m3."""
    bf16_first_layers: NonNegativeInt = 0
    """fp8: number of first blocks that stay in bf16. The embedding always does."""
    bf16_last_layers: NonNegativeInt = 0
    """fp8: number of last blocks that stay in bf16."""
    head_dtype: Literal["bf16", "fp8"] = "bf16"
    """fp8: format of the GEMM of the output head."""

    @property
    def compute_dtype(self) -> str:
        """Dtype of activations and GEMMs (of those that are not fp8)."""
        return "fp32" if self.kind == "fp32" else "bf16"

    @property
    def grad_accum_dtype(self) -> str:
        """Dtype in which gradients are accumulated over micro batches."""
        return self.grad_dtype or ("bf16" if self.kind == "bf16_sr" else "fp32")

    @property
    def grad_reduce_dtype(self) -> str:
        """Dtype in which gradients are reduced over data parallel ranks."""
        return self.reduce_dtype or self.grad_accum_dtype

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "fp32" and self.grad_dtype == "bf16":
            raise ValueError("grad_dtype=bf16: kind=fp32 has fp32 gradients; nearest: grad_dtype=fp32")
        for name in ("fp8_scaling", "fp8_backward", "bf16_first_layers", "bf16_last_layers", "head_dtype"):
            value = getattr(self, name)
            if self.kind != "fp8" and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value}: requires kind=fp8; nearest: kind=fp8")
        return self


class RecomputeSection(Section):
    """Activation recomputation: activations that are computed again in the backward pass instead of stored."""

    kind: Literal["none", "attention", "selective", "full"] = "none"
    """none; attention: only core attention; selective: recompute.modules; full: entire blocks."""
    modules: Annotated[
        tuple[Literal["core_attention", "attention", "mlp", "activation", "norm"], ...], Strict(False), ONE_OR_MORE
    ] = ()
    """kind=selective: modules of a block to recompute. `activation` is the SwiGLU or GELU inside the MLP. Of it and of
    norms, only the result is computed again, which the next matmul would have saved: little work for its memory."""

    @model_validator(mode="after")
    def _check_modules(self) -> Self:
        if (self.kind == "selective") != bool(self.modules):
            modules = list(self.modules)
            raise ValueError(f"modules={modules}: requires kind=selective and at least one module, such as mlp")
        return self


class CompileSection(Section):
    """torch.compile, applied to each block, the loss and the optimizer update."""

    enabled: bool = False
    """Compile: the first step takes longer, later ones are faster. On a CPU this needs a C++ compiler."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of torch.compile."""
    cuda_graphs: bool = False
    """Capture each micro batch as a CUDA graph and replay it (one rank; where the device supports graphs). For models
    so small that the host is the bottleneck. Memory of a captured graph stays allocated."""


class EvaluateSection(Section):
    """Evaluation on held-out samples during training."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: none. Needs data.validation_fraction above 0, data.split or evaluate.sets."""
    batches: PositiveInt = 8
    """Maximum global batches per evaluation, of the held-out samples and of each of evaluate.sets."""
    sets: dict[Annotated[str, Field(pattern=r"^\w+$")], Paths] = Field(default_factory=dict)
    """Validation sets by name, each a file or a list, read as data.paths are: {web: valid/web.jsonl, code: c.jsonl}.
    Their losses are logged as evaluate/NAME/loss. `trainyard eval RUN` evaluates them too."""
    function: FunctionPath | None = None
    """User evaluation, `module:function`: takes the trainer, returns {name: number}. Replaces the built-in one."""
    metrics: dict[str, FunctionPath] = Field(default_factory=dict)
    """User metrics by name, `module:function`: each takes (output, batch), returns (sum, count)."""

    @field_validator("sets")
    @classmethod
    def _check_sets(cls, sets: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        if empty := [name for name, paths in sets.items() if not paths]:
            raise ValueError(f"{empty[0]}=[]: names no file; nearest: {empty[0]}: valid.jsonl")
        return sets

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        if self.sets and self.function:
            raise ValueError(f"function={self.function}: replaces the evaluation of evaluate.sets; set only one")
        return self


class SamplesSection(Section):
    """Text samples during training: the model continues prompts. Losses and weights of the run do not change."""

    every: NonNegativeInt = 0
    """Steps between samples; 0: none. Each time costs samples.max_new_tokens forward passes. Causal models only."""
    prompts: Annotated[tuple[str, ...], Strict(False), ONE_OR_MORE, Field(min_length=1)] = ("Once upon a time", "The")
    """Texts to continue. An empty text starts a document."""
    tokenizer: str | None = None
    """Tokenizer of the prompts, as data.tokenizer. Default: data.tokenizer; if that is bytes and data.source is not
    text, the tokenizer of the checkpoint from which the run resumes or starts."""
    max_new_tokens: PositiveInt = 32
    """Maximum new tokens per prompt. A sample ends before that at the end-of-text token, or if prompt and new tokens
    are data.seq_len tokens long."""
    temperature: float = Field(0.8, ge=0)
    """Divides the logits; 0: always the most likely token."""
    top_k: NonNegativeInt = 0
    """Sample among this many of the most likely tokens; 0: all."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Sample among the most likely tokens whose probabilities sum to this, above 0 to 1."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the samples, 0 to 2^63 - 1. It is the same at each step, so that samples of two steps can be compared."""


class LogSection(Section):
    """Logging and the run directory."""

    every: PositiveInt = 10
    """Steps between log lines."""
    name: str = Field("run", pattern=r"^[\w.\-]+$")
    """Name of the run; its directory is log.directory/NAME."""
    directory: str = "runs"
    """Parent of run directories."""
    loggers: Annotated[tuple[str, ...], Strict(False), ONE_OR_MORE] = ("tensorboard",)
    """What receives metrics, text samples and events besides the files of the run: tensorboard, wandb, mlflow, or a
    subclass of trainyard.Logger, `module:Class`."""
    spans: bool = True
    """Record where the time of each rank goes (spans/ in the run directory), for `trainyard trace` and `top`."""

    @field_validator("loggers")
    @classmethod
    def _check_loggers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name in LOGGERS.built_in or re.fullmatch(USER_PATH, name):
                continue
            if name not in (known := LOGGERS.names()):
                nearest = nearest_name(name, known) or "; nearest: my_module:MyLogger"
                raise ValueError(f"{name} is not one of {', '.join(known)} or module:Class{nearest}")
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{min(repeated)} is listed twice")
        return names


class ProfileSection(Section):
    """A trace of a few steps by torch's profiler, with a memory snapshot, in profile/ of the run directory."""

    steps: Annotated[tuple[PositiveInt, ...], Strict(False)] = ()
    """First and last step to trace, such as [10, 12]; empty: none."""
    ranks: Annotated[tuple[NonNegativeInt, ...], Strict(False), Field(min_length=1)] = (0,)
    """Ranks that write a trace."""

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if steps and (len(steps) != 2 or steps[0] > steps[1]):
            nearest = [min(steps), max(steps)]
            raise ValueError(f"not a first and a last step; nearest: {nearest}")
        return steps


class DeviceSection(Section):
    """Device and kernels."""

    name: Annotated[str, NameOrPath("auto", registry=DEVICES, path="module:NAME", aliases=device_aliases)] = "auto"
    """Device; auto picks the best one of this machine. Another one is a trainyard.DeviceKind."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of torch. Default: chosen by torch."""
    kernels: Literal["fused", "plain"] = "fused"
    """fused: fused kernels, where the device has them; plain: operators of torch, for comparison."""
    attention: str = "auto"
    """Attention kernel to try first, by the device's name for it; auto: the fastest."""
    lnc: Annotated[int, Field(ge=1, le=2)] | None = None
    """Trainium: physical cores per logical core, which is a rank. Default: 1 on trn1, 2 on trn2 and trn3."""
    deterministic: bool = False
    """Use only deterministic kernels (slower on a GPU; a CPU is always deterministic)."""
    batch_invariant: bool = False
    """Give a sequence the same bits whatever else is in the batch, in training and in generation, whose
    log-probabilities are then equal (slower). Replaces the kernels of the key above."""

    @field_validator("attention")
    @classmethod
    def _check_attention(cls, value: str, info: ValidationInfo) -> str:
        if value == "auto" or is_user_path(info.data.get("name", "")):  # reading a configuration imports no user code
            return value
        choices = ("auto", *(kernel for kind in all_devices().values() for kernel in kind.attention_kernels))
        if value not in choices:
            raise ValueError(f"not one of {', '.join(choices)}{nearest_name(value, choices)}")
        return value


class Config(Section):
    """The configuration of one run."""

    base: str = Field("", exclude=True)
    """Recipe, file (relative to this one) or run that has all keys which this file leaves out. Only in a file."""
    description: str = ""
    """One line for `trainyard recipes`."""
    hardware: str = ""
    """Hardware the file is written for, such as 4 x trn1.32xlarge."""
    model: SerializeAsAny[ModelConfig]
    data: DataSection = DataSection()
    train: TrainSection
    preference: PreferenceSection = PreferenceSection()
    rollout: RolloutSection = RolloutSection()
    policy: PolicySection = PolicySection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    layout: LayoutSection = LayoutSection()
    recompute: RecomputeSection = RecomputeSection()
    compile: CompileSection = CompileSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    samples: SamplesSection = SamplesSection()
    log: LogSection = LogSection()
    profile: ProfileSection = ProfileSection()
    device: DeviceSection = DeviceSection()

    @field_validator("base")
    @classmethod
    def _refuse_base(cls, value: str) -> str:
        """Loading a file merges it into its base."""
        raise ValueError("only a file can have a base; write it into the file")

    @field_validator("model", mode="before")
    @classmethod
    def _validate_model(cls, value: object) -> object:
        """The keys of the section depend on its family."""
        if not isinstance(value, dict):
            return value
        if value.get("family") is None:
            raise PydanticCustomError("union_tag_not_found", "missing")
        name = str(value["family"])
        try:
            family = find_family(name)
        except UserError as error:
            raise PydanticCustomError("family_error", "{reason}", {"name": name, "reason": str(error)}) from None
        return validate_at((name,), family.config_class, value)  # as that of a tagged union

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        train, model, data = self.train, self.model, self.data
        if train.global_batch % train.micro_batch:
            raise ValueError(
                f"train.global_batch={train.global_batch}: not a multiple of train.micro_batch={train.micro_batch}; "
                f"nearest: {nearest_multiples(train.global_batch, train.micro_batch)}"
            )
        if data.order != "shuffled" and train.seed >= 2**32:
            raise ValueError(
                f"train.seed={train.seed}: data.order={data.order} uses seeds of 32 bits; nearest: {2**32 - 1}"
            )
        if self.profile.steps and self.profile.steps[1] > train.steps:
            raise ValueError(
                f"profile.steps={list(self.profile.steps)}: the run ends with step train.steps={train.steps}; "
                f"nearest: [{min(self.profile.steps[0], train.steps)}, {train.steps}]"
            )
        longest = model.max_positions * (2 if data.has_flag("has_pairs") else 1)  # positions restart in each answer
        if data.seq_len > longest:
            raise ValueError(
                f"data.seq_len={data.seq_len}: longer than model.max_positions={model.max_positions}; "
                f"nearest: {longest}"
            )
        if not family_of(model).is_causal:
            name = model.family
            if self.samples.every:
                raise ValueError(f"samples.every={self.samples.every}: {name} does not continue text; nearest: 0")
            if data.separates_documents:
                key = "packing" if data.packing else "document_mask"
                raise ValueError(f"data.{key}=true: each {name} sample is one sentence pair; nearest: false")
            if not is_user_path(data.source) and family_of(model).loss not in SOURCES.find(data.source).losses:
                raise ValueError(f"data.source={data.source}: {name} reads masked sentence pairs; nearest: hdf5")
            if data.max_predictions > data.seq_len - 3:
                raise ValueError(
                    f"data.max_predictions={data.max_predictions}: does not fit in a sample of "
                    f"data.seq_len={data.seq_len}; nearest: {max(data.seq_len - 3, 1)}"
                )
        if is_user_path(train.loss or "") and any(getattr(model, key, 0.0) for key in ("balance_loss", "z_loss")):
            raise ValueError(
                f"train.loss={train.loss}: its count divides all gradients, those of the router's losses too; "
                "nearest: model.balance_loss=0 and model.z_loss=0"
            )
        check_objective(self)
        evaluate = self.evaluate
        holds_out = data.validation_fraction or data.split or is_user_path(data.source)
        if evaluate.every and not (holds_out or evaluate.function or evaluate.sets):
            raise ValueError(
                f"evaluate.every={evaluate.every}: no samples are held out; set data.validation_fraction, "
                "for example 0.05, or evaluate.sets"
            )
        if evaluate.sets and data.source == "synthetic":
            raise ValueError("evaluate.sets: data.source=synthetic reads no files; nearest: data.source=text")
        return self

    @model_validator(mode="after")
    def _check_precision_and_schedule(self) -> Self:
        model, layout, precision = self.model, self.layout, self.precision
        if layout.pipeline_schedule != "1f1b" and self.compile.enabled:
            raise ValueError(
                f"layout.pipeline_schedule={layout.pipeline_schedule}: splits the backward pass, which compiled blocks "
                "do not support; nearest: 1f1b, or compile.enabled=false"
            )
        for wrapper, options in model.linear.wrappers():
            wrapper.check(options, self)
        if layout.zero >= 2 and precision.kind == "bf16_sr" and precision.grad_accum_dtype == "fp32":
            raise ValueError(
                f"precision.grad_dtype=fp32: with layout.zero={layout.zero} gradients have the dtype of the weights; "
                "nearest: bf16"
            )
        if precision.kind == "fp8":
            for name, size in (("hidden", model.hidden), ("ffn", getattr(model, "ffn", None))):
                if size and size % 16:
                    multiples = f"a multiple of 16; nearest: {nearest_multiples(size, 16)}"
                    raise ValueError(f"model.{name}={size}: precision.kind=fp8 needs {multiples}")
            if precision.bf16_first_layers + precision.bf16_last_layers >= model.layers:
                raise ValueError(
                    f"precision.bf16_first_layers={precision.bf16_first_layers}: with "
                    f"bf16_last_layers={precision.bf16_last_layers} none of {model.layers} blocks is left for fp8; "
                    "nearest: kind=bf16"
                )
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr={self.schedule.min_lr:g}: above optimizer.lr={self.optimizer.lr:g}; "
                f"nearest: {self.optimizer.lr:g}"
            )
        check_batch_invariance(self)
        return self
