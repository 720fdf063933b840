"""A model class for lm-evaluation-harness: checkpoints of any format, under the name `trainyard`.

The harness finds classes of other packages only if their module is imported. `trainyard eval CKPT --tasks ...` does so,
and this module runs the harness's own command line with the class registered:

    python -m trainyard.evaluate.lm_eval_model run --model trainyard --model_args pretrained=CKPT --tasks ...
"""

import difflib
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from lm_eval import simple_evaluate, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainyard.checkpoint.weights import WeightSource
from trainyard.core.errors import UserError, one_line
from trainyard.core.world import World
from trainyard.evaluate.eval_config import evaluation_config
from trainyard.evaluate.evaluator import CheckpointSource, Evaluator
from trainyard.evaluate.score_continuations import TokenPair, score_continuations
from trainyard.families.registry import predicts_tokens
from trainyard.formats.registry import open_weights, read_model_files
from trainyard.inference.build_engine import EngineShape, build_engine
from trainyard.inference.requests import Request, SamplingOptions
from trainyard.inference.scheduler import RequestScheduler, run_requests
from trainyard.inference.text.tokenizer_files import model_end_ids, tokenizer_directory
from trainyard.remote.local_copies import is_remote_model, local_weights

DEFAULT_MAX_NEW_TOKENS = 256
"""The harness's default."""
MAX_NEW_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
STOP_TAIL_TOKENS = 64
"""New tokens in which stop strings are looked for after each step."""

T = TypeVar("T")
R = TypeVar("R")


def run_tasks(
    source: CheckpointSource,
    tasks: Sequence[str],
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Results and versions of tasks, by the names of the harness.

    All ranks call this; the first rank of each host gets the results, the others nothing.
    """
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    for name in tasks:
        if not name.endswith(".yaml") and not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, 3)
            raise UserError(f"--tasks {name}: no such task; nearest: {', '.join(close) or 'see lm_eval ls tasks'}")
    config, weights = source.config, source.opened.weights
    evaluator = Evaluator(config, weights, source.world, on_progress=source.on_progress)
    model = TrainyardLM(evaluator, tokenizer or load_hf_tokenizer(weights, source.path), config.train.micro_batch)
    if evaluator.mesh.layout_rank:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = simple_evaluate(
        model, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
    )
    if results is None:
        return {}
    return {key: results[key] for key in ("results", "groups", "versions", "n-shot", "n-samples") if key in results}


@register_model("trainyard")
class TrainyardLM(TemplateLM):
    """A checkpoint as the harness sees it. Requests are divided over data-parallel ranks; tensor-parallel ranks compute
    each of them together."""

    def __init__(
        self,
        pretrained: str | Evaluator,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **overrides: Any,
    ) -> None:
        """`pretrained` is a checkpoint of any format, or an Evaluator that holds one. `tokenizer` is the directory of a
        tokenizer; by default it comes with the checkpoint. `overrides` are configuration keys, such as
        precision.kind."""
        super().__init__()
        if isinstance(pretrained, str):
            if device == "cpu":  # the harness's default is a GPU, whatever this machine has
                overrides["device.name"] = device
            weights = open_weights(pretrained).weights
            pairs = [f"{key}={value}" for key, value in overrides.items()]
            world = World.from_environment()
            self.evaluator = Evaluator(evaluation_config(weights, pairs, world.size, {}), weights, world)
            tokenizer = tokenizer or load_hf_tokenizer(weights, pretrained)
        else:
            self.evaluator = pretrained
        check_layout(self.evaluator)
        loaded: Any = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.tokenizer = loaded
        if self.tokenizer is None:
            raise UserError(f"{pretrained}: the checkpoint has no tokenizer for tasks; pass --tokenizer")
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"{pretrained}: its tokenizer has no eos_token, and its config.json no eos_token_id")
        self.model, self.mesh = self.evaluator.models[0], self.evaluator.mesh
        self._device = self.evaluator.device.torch_device
        self.model_config = self.evaluator.config.model
        self.max_length = min(int(max_length or self.model_config.max_positions), self.model_config.max_positions)
        self.batch_size = 8 if batch_size in (None, "auto") else int(batch_size)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]

        def score(own_pairs: Sequence[TokenPair]) -> list[tuple[float, bool]]:
            with self._progress("loglikelihood", len(own_pairs), disable_tqdm) as progress:
                size, handle = self.batch_size, self._device
                scores = score_continuations(
                    self.model, own_pairs, self.max_length, size, handle, lambda count: progress.update(count)
                )
                return [(score.logprob, score.is_greedy) for score in scores]

        return self._divide_over_ranks(pairs, score)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            disjoint = [(None, *utils.make_disjoint_window(window)) for window in rolling]
            windows += disjoint
            counts.append(len(disjoint))
        logprobs = [logprob for logprob, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        ends = list(accumulate(counts))
        return [sum(logprobs[end - count : end]) for count, end in zip(counts, ends, strict=True)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        eos = self.tokenizer.decode(self.eot_token_id)

        def generate(own_requests: Sequence[Instance]) -> list[str]:
            stops = [handle_stop_sequences(_stop_strings(request.args[1]), eos) for request in own_requests]
            numbered = [self._generation_request(index, request) for index, request in enumerate(own_requests)]
            scheduler = self._make_scheduler()

            def is_stopped(index: int, tokens: list[int]) -> bool:
                tail = self.tokenizer.decode(tokens[-STOP_TAIL_TOKENS:])
                return any(stop in tail for stop in stops[index] if stop)

            with self._progress("generate_until", len(numbered), disable_tqdm) as progress:
                tokens = run_requests(scheduler, numbered, is_stopped, lambda: progress.update(1))
            texts = [self.tokenizer.decode(tokens[index], skip_special_tokens=True) for index in range(len(numbered))]
            return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]

        return self._divide_over_ranks(requests, generate)

    def _make_scheduler(self) -> RequestScheduler:
        """A scheduler with a cache of keys and values, whose model shares the weights of this one."""
        parameters = dict(self.model.named_parameters())
        dtype = next(iter(parameters.values())).dtype

        def refuse(name: str) -> Any:
            raise AssertionError(f"{name}: not a parameter of the evaluated model")

        shape = EngineShape(self.batch_size, self.max_length, dtype)
        engine = build_engine(self.model_config, self.evaluator.device, self.mesh.tp, shape, refuse, parameters)
        return RequestScheduler(engine, self.model_config.vocab)

    def _generation_request(self, index: int, request: Instance) -> Request:
        context, options = request.args
        given = [options[key] for key in MAX_NEW_TOKENS_KEYS if options.get(key) is not None]
        max_new_tokens = int(given[0]) if given else DEFAULT_MAX_NEW_TOKENS
        longest = self.max_length - max_new_tokens
        if longest < 1:
            raise UserError(f"a task asks for {max_new_tokens} new tokens: the model's limit is {self.max_length}")
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        end_ids = frozenset((self.eot_token_id, *(self.model_config.eos_token_id or ())))
        sampling = SamplingOptions(temperature=temperature, max_new_tokens=max_new_tokens, end_ids=end_ids)
        return Request(index, self.tok_encode(context)[-longest:], sampling)

    def _divide_over_ranks(self, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """The results of `work` for all items, each computed by one data-parallel rank."""
        own = range(self.mesh.coords["dp"], len(items), self.mesh.layout.dp)
        results = dict(zip(own, work([items[index] for index in own]), strict=True))
        merged: dict[int, R] = {}
        for part in self.mesh.all_gather_object(results):
            merged |= part
        return [merged[index] for index in range(len(items))]

    def _progress(self, kind: str, total: int, disabled: bool) -> Any:
        return tqdm(total=total, desc=f"Running {kind} requests", disable=disabled or self.mesh.layout_rank > 0)


def _stop_strings(options: dict[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def check_layout(evaluator: Evaluator) -> None:
    """Raise UserError if tasks cannot run at this layout or with this model."""
    layout, model = evaluator.layout, evaluator.config.model
    for axis, size in (("pp", layout.pp), ("cp", layout.cp)):
        if size > 1:
            raise UserError(
                f"layout.{axis}={size}: tasks have texts of any length; use layout.tp, or data parallel ranks"
            )
    if not predicts_tokens(model):
        raise UserError(f"model.family={model.family}: tasks need a causal model that predicts tokens")


def load_hf_tokenizer(weights: WeightSource, source: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint as transformers reads it; None if the checkpoint has none."""
    local = local_weights(source) if is_remote_model(source) else Path(source)
    files = read_model_files(weights, source)
    with tokenizer_directory(files) as directory:
        if directory is None:
            return None
        if (local / "config.json").is_file() and (local / "tokenizer_config.json").is_file():
            directory = local
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory))
        except Exception as error:  # transformers raises many types
            raise UserError(f"{source}: transformers cannot read its tokenizer: {one_line(error)}") from None
    if tokenizer.eos_token_id is None and (ids := model_end_ids(files, weights.model)):
        tokenizer.eos_token_id = ids[0]
    return tokenizer


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
