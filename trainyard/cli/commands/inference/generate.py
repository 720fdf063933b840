"""`trainyard generate`: Continue prompts with the model of a checkpoint; talk to it."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Context, Option

from trainyard.cli.console import prefetch_weights, print_line, terminal_safe
from trainyard.cli.options import (
    Adapter,
    AsJson,
    BatchInvariant,
    CheckpointSource,
    DeviceName,
    Fp8Weights,
    InferenceDtype,
    MaxSeqLen,
    TensorParallel,
    TokenizerName,
)
from trainyard.cli.ranks import launch_tensor_parallel, starts_tensor_parallel
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.world import World

if TYPE_CHECKING:  # imports torch; `generate --help` does not wait for it
    from trainyard.inference.generate import Completion, Prompt
    from trainyard.inference.load import InferenceModel


def generate(
    context: Context,
    source: CheckpointSource,
    adapter: Adapter = None,
    prompt: Annotated[list[str] | None, Option("--prompt", "-p", help="Text to continue; repeatable.")] = None,
    batch: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="A prompt per line: text, or JSON with prompt, tokens or messages; - reads standard input.",
        ),
    ] = None,
    chat: Annotated[bool, Option("--chat", help="Talk to the model; with --prompt, ask each as a user.")] = False,
    system: Annotated[str, Option(help="With --chat: the system message.")] = "",
    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", "-n", min=1, help="Maximum number of tokens to generate.")
    ] = 128,
    temperature: Annotated[float, Option(min=0, help="0: always the most likely token.")] = 0.0,
    top_p: Annotated[
        float, Option(min=0, max=1, help="Sample among the most likely tokens whose probabilities sum to this.")
    ] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Sample among the K most likely tokens; 0: all.")] = 0,
    seed: Annotated[int, Option(help="The same seed, prompt and options give the same text.")] = 0,
    stop: Annotated[list[str] | None, Option(help="Text that ends a completion; repeatable.")] = None,
    ignore_end: Annotated[bool, Option("--ignore-end", help="Continue after the end-of-text token.")] = False,
    tp: TensorParallel = 1,
    max_batch: Annotated[int, Option(min=1, help="Maximum number of prompts per batch.")] = 8,
    max_seq_len: MaxSeqLen = None,
    device: DeviceName = "auto",
    dtype: InferenceDtype = None,
    fp8_weights: Fp8Weights = False,
    batch_invariant: BatchInvariant = False,
    compiled: Annotated[bool, Option("--compile", help="Compile the model first; pays off for many tokens.")] = False,
    tokenizer: TokenizerName = None,
    as_json: AsJson = False,
) -> int:
    """Continue prompts with the model of a checkpoint.

    CKPT needs no conversion: a run directory (its latest checkpoint), a native checkpoint of any layout, a Hugging Face
    directory, NxD or Megatron-LM shards. The tokenizer comes with it. One prompt is printed as it is generated; of
    several, each is printed when it is complete, in their order. Without a tokenizer, a prompt is a list of token ids:
    --prompt "1 15 27".

    Examples:

      trainyard generate runs/my-run --prompt "Once upon a time"

      trainyard generate hf-model -p "def add(" --temperature 0.7 --seed 1

      trainyard generate runs/my-run --batch prompts.jsonl --json > out.jsonl

      trainyard generate hf-model --chat

      trainyard generate hf-model --adapter runs/my-lora --chat

      trainyard generate deepseek-ai/deepseek-coder-1.3b-base -p "def add("
    """
    world = World.from_environment()
    if not prompt and not batch and not chat:
        raise UserError("nothing to continue: give --prompt, --batch or --chat")
    if batch and prompt:
        raise UserError("--batch: not together with --prompt")
    prefetch_weights(source, world)
    if starts_tensor_parallel(tp, world):
        if chat and not prompt:
            raise UserError("--chat needs --prompt if --tp is larger than 1: ranks have no terminal")
        if batch and str(batch) == "-":
            raise UserError("--batch -: not with --tp; write the prompts to a file")
        return launch_tensor_parallel(context, source, tp, device, world)
    from trainyard.inference.generate import generate_texts
    from trainyard.inference.load import InferenceOptions, load_for_inference
    from trainyard.inference.requests import SamplingOptions
    from trainyard.parallel.mesh import shutdown_distributed

    texts = _read_batch(batch) if batch else [{"prompt": text} for text in prompt or []]
    options = InferenceOptions(
        device,
        dtype,
        max(1, min(max_batch, len(texts) or 1)),
        max_seq_len,
        compiled,
        fp8_weights=fp8_weights,
        batch_invariant=batch_invariant,
        adapter=adapter,
    )
    console = Console(highlight=False, stderr=True, quiet=world.rank > 0)
    with console.status("loading"):
        model = load_for_inference(source, options, tokenizer, world)
    ends = frozenset() if ignore_end else model.end_ids
    sampling = SamplingOptions(temperature, top_p, top_k, seed, max_new_tokens=max_new_tokens, end_ids=ends)
    if chat and not prompt and not batch:
        _talk(model, sampling, tuple(stop or ()) + model.chat_template.stop, system, console)
        return 0
    stops = tuple(stop or ()) + (model.chat_template.stop if chat else ())
    prompts = [_make_prompt(model, text, index, chat, system) for index, text in enumerate(texts)]
    begin, tokens = time.monotonic(), 0
    streams = len(prompts) == 1 and not as_json
    if streams and world.rank == 0 and prompts[0].text:
        print(prompts[0].text if not chat else "", end="", flush=True)
    for completion in generate_texts(
        model, prompts, sampling, stops, _print_now if streams and world.rank == 0 else None
    ):
        tokens += len(completion.tokens)
        if world.rank == 0:
            _print_completion(completion, as_json, streams, chat)
    seconds = time.monotonic() - begin
    print_line(
        console, f"{counted(tokens, 'token')} in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)", "dim"
    )
    shutdown_distributed()
    return 0


def _read_batch(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file: a JSON object, or plain text, per line. Empty lines are left out."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--batch {path}: cannot be read: {error}") from None
    prompts = [_parse_line(line, path, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise UserError(f"--batch {path}: has no prompts")
    return prompts


def _parse_line(line: str, path: Path, number: int) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(f"--batch {path}, line {number}: not JSON: {error}") from None
    if not isinstance(entry, dict) or not {"prompt", "tokens", "messages"} & set(entry):
        raise UserError(f"--batch {path}, line {number}: needs prompt, tokens or messages")
    tokens, messages = entry.get("tokens", []), entry.get("messages", [])
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise UserError(f"--batch {path}, line {number}: tokens is not a list of numbers")
    if not isinstance(messages, list) or any(not isinstance(message, dict) for message in messages):
        raise UserError(f"--batch {path}, line {number}: messages is not a list of objects with role and content")
    return entry


def _make_prompt(model: "InferenceModel", entry: dict[str, Any], index: int, chat: bool, system: str) -> "Prompt":
    from trainyard.inference.generate import Prompt

    if "tokens" in entry:
        return Prompt(index, "", entry["tokens"])
    if "messages" in entry or chat:
        messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        return Prompt(index, "", model.encode_chat(messages))
    text = str(entry["prompt"])
    if model.tokenizer is None:
        try:
            return Prompt(index, "", [int(word) for word in text.replace(",", " ").split()])
        except ValueError:
            raise UserError("the checkpoint has no tokenizer: give --tokenizer, or token ids as prompt") from None
    return Prompt(index, text, model.encode_prompt(text))


def _print_now(text: str) -> None:
    print(_safe(text), end="", flush=True)


def _safe(text: str) -> str:
    """Text of a model for a terminal, which must not obey control characters in it. Files get it unchanged."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else terminal_safe(c) for c in text)


def _print_completion(completion: "Completion", as_json: bool, streams: bool, chat: bool) -> None:
    if as_json:
        entry = {
            "index": completion.prompt.index,
            "prompt": completion.prompt.text,
            "text": completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
        }
        print(json.dumps(entry, ensure_ascii=False), flush=True)
    elif streams:
        print()
    else:
        print(_safe(completion.text if chat else completion.prompt.text + completion.text), end="\n\n", flush=True)


def _talk(model: "InferenceModel", sampling: Any, stop: tuple[str, ...], system: str, console: Console) -> None:
    """Read messages from the terminal until the end of the input, and answer each."""
    from trainyard.inference.generate import Prompt, generate_texts

    messages = [{"role": "system", "content": system}] if system else []
    print_line(console, "Type a message; Ctrl-D ends.", "dim")
    for line in _lines():
        prompt = Prompt(0, "", model.encode_chat([*messages, {"role": "user", "content": line}]))
        (answer,) = generate_texts(model, [prompt], sampling, stop, _print_now)
        print()
        messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer.text}]


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
