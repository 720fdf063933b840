"""Loads a checkpoint of any format for inference: model, cache, tokenizer and special tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainyard import devices
from trainyard.checkpoint.weights import WeightSource
from trainyard.core.errors import UserError
from trainyard.core.world import ONE_RANK, World
from trainyard.data.text.chat_template import ChatTemplate
from trainyard.data.text.tokenizer import FastTokenizer, Tokenizer, read_json
from trainyard.devices import Device
from trainyard.formats.registry import open_adapter, open_weights, read_model_files
from trainyard.inference.adapters import AdapterStack
from trainyard.inference.build_engine import EngineShape, build_engine
from trainyard.inference.scheduler import RequestScheduler
from trainyard.inference.text.json_schema import SchemaCompiler
from trainyard.inference.text.tokenizer_files import find_tokenizer, model_end_ids
from trainyard.models import ModelConfig, ParameterValues, TransformerStage, blueprint_of, family_of
from trainyard.models.sharding import local_tensor
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLAT_FUSIONS = {"fuse_qkv": True, "fuse_gate_up": True}
"""Whatever the run stored: one matrix multiplication instead of three, and one instead of two."""


@dataclass(frozen=True)
class InferenceOptions:
    """How a checkpoint is loaded."""

    device: str = "auto"
    dtype: str | None = None
    """A key of DTYPES; None: bf16 on accelerators, fp32 on the CPU."""
    max_batch: int = 8
    """Maximum number of sequences per batch."""
    max_seq_len: int | None = None
    """Longest prompt plus new tokens; None: the model's limit."""
    compiled: bool = False
    """Compile decode steps: worth it for many tokens on a CPU."""
    fused_kernels: bool = True
    fp8_weights: bool = False
    """Keep the matrices of linear layers in fp8."""
    batch_invariant: bool = False
    """Give a sequence the same bits whatever else is in the batch."""
    shares_prefixes: bool = False
    """Many prompts begin alike, as those of a server do."""
    adapter: str | None = None
    """An adapter that all requests use."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Adapters by name, of which every request chooses one, or none."""


@dataclass(frozen=True)
class InferenceModel:
    """A model that is ready to generate."""

    model_config: ModelConfig
    module: TransformerStage
    scheduler: RequestScheduler
    tokenizer: Tokenizer | None
    """None if the checkpoint has no tokenizer: prompts are token ids then."""
    model_files: dict[str, bytes]
    """Contents of the checkpoint's tokenizer.json, generation_config.json and others."""
    device: Device
    mesh: Mesh
    adapters: Mapping[str, dict[str, bytes]] = field(default_factory=dict)
    """The model files of each adapter, by name, in the order of their numbers in requests."""

    def with_adapter(self, name: str) -> "InferenceModel":
        """The model with the tokenizer, template and end tokens of an adapter."""
        files = self.adapters[name]
        return replace(self, model_files=files, tokenizer=find_tokenizer(None, files) or self.tokenizer)

    @property
    def max_seq_len(self) -> int:
        return self.scheduler.max_seq_len

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text: those of generation_config.json, of the model, or of the tokenizer.
        Without any, a text ends at its limit."""
        if ids := model_end_ids(self.model_files, self.model_config):
            return frozenset(ids)
        end_id = self.tokenizer.end_id if self.tokenizer else None
        return frozenset() if end_id is None else frozenset([end_id])

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, with the tokens that this tokenizer puts before every text."""
        if self.tokenizer is None:
            raise UserError("the checkpoint has no tokenizer; give --tokenizer, or prompts of token ids")
        if isinstance(self.tokenizer, FastTokenizer):
            return _fast_encode(self.tokenizer, text, add_special_tokens=True)
        tokens = [int(token) for token in self.tokenizer.encode([text])[0]]
        bos = self.model_config.bos_token_id
        adds_bos = read_json(self.model_files, "tokenizer_config.json").get("add_bos_token")
        return [bos, *tokens] if bos is not None and adds_bos else tokens

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of the prompt that the checkpoint's chat template makes of `messages`."""
        text = self.chat_template.render(messages)
        if isinstance(self.tokenizer, FastTokenizer):  # the template has the special tokens
            return _fast_encode(self.tokenizer, text, add_special_tokens=False)
        return self.encode_prompt(text)

    @property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate.from_files(self.model_files)


def _fast_encode(tokenizer: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The tokens of a text. `encode` of the library would stop all other threads meanwhile, `encode_batch` does not."""
    (encoded,) = tokenizer.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoded.ids)


def load_for_inference(
    source: str, options: InferenceOptions, tokenizer: str | None = None, world: World = ONE_RANK
) -> InferenceModel:
    """Load the checkpoint at `source`, a path or URL of any known format. All tensor-parallel ranks call this.

    `tokenizer` is the path of one, or `bytes`; by default it comes with the checkpoint.
    """
    weights = open_weights(source).weights
    if options.adapter:
        weights = open_adapter(options.adapter, weights, source)
    fusions = {} if options.batch_invariant else FLAT_FUSIONS  # a wider matmul may sum otherwise
    config = weights.model.model_copy(
        update={key: value for key, value in fusions.items() if hasattr(weights.model, key)}
    )
    if not family_of(config).is_causal:
        raise UserError(f"{source}: a {config.family} model fills masks and does not generate; see trainyard fill-mask")
    if config.score_head:
        raise UserError(
            f"{source}: a reward model scores answers and does not generate; nearest: the model it began as"
        )
    if options.fp8_weights and options.compiled:
        raise UserError("--fp8-weights: not with --compile")
    device = devices.select(options.device)
    dtype = DTYPES[options.dtype or ("fp32" if device.synchronous else "bf16")]
    device.prepare(False, world)
    mesh = Mesh.create(Layout(tp=world.size), device, world)
    limit = config.max_positions
    max_seq_len = options.max_seq_len or limit
    if not 2 <= max_seq_len <= limit:
        raise UserError(f"--max-seq-len {max_seq_len}: the model's limit is {limit}, and 2 are needed")
    adapted = {name: open_adapter(path, weights, source) for name, path in options.adapters.items()}
    engine = build_engine(
        config,
        device,
        mesh.tp,
        EngineShape(options.max_batch, max_seq_len, dtype, options.fp8_weights),
        _rank_values(weights, config, mesh, device.torch_device, dtype),
        compiled=options.compiled,
        fused_kernels=options.fused_kernels,
        batch_invariant=options.batch_invariant,
        adapters=AdapterStack(adapted, config, mesh.model_shard, dtype) if adapted else None,
    )
    model_files = read_model_files(weights, options.adapter or source)
    adapter_files = {
        name: read_model_files(each, options.adapters[name]) or model_files for name, each in adapted.items()
    }
    found = find_tokenizer(tokenizer, model_files)
    scheduler = RequestScheduler(engine, config.vocab, options.shares_prefixes)
    model = InferenceModel(config, engine.model, scheduler, found, model_files, device, mesh, adapter_files)
    if found:
        scheduler.schemas = SchemaCompiler(found, config.vocab, model.end_ids)
    return model


def check_tensor_parallel(source: str, tp: int) -> None:
    """Raise UserError if `tp` ranks cannot share the model, before they start."""
    model = open_weights(source).weights.model
    if model.heads % tp:
        raise UserError(f"--tp {tp}: does not divide the model's {model.heads} heads")
    for key, size in model.ffn_sizes.items():
        if size % tp:
            raise UserError(f"--tp {tp}: does not divide the model's {key}={size}")


def _rank_values(
    weights: WeightSource, config: ModelConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype
) -> ParameterValues:
    """A function from parameter names to this rank's values, which are read when it is called."""
    blueprint = blueprint_of(config)

    def values(name: str) -> Tensor:
        local = local_tensor(blueprint, name, mesh.model_shard, weights.read)
        return local.to(device, dtype).contiguous()  # GPT-2's files store transposed matrices

    return values
