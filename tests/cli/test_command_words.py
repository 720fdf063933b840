"""The command line of ranks: what a command was given, without what only its launcher obeys."""

import shlex

import pytest

from trainyard.cli.main import load_command
from trainyard.cli.ranks import LAUNCH_OPTIONS, command_words

LINES = [
    "train my.yaml optimizer.lr=1e-4 layout.tp=2 --nproc 8 --smoke --continue --logs logs --hang-timeout 60",
    "train",
    "verify my.yaml layout.tp=2 --nproc 4 --steps 5 --smoke",
    "eval runs/x 'a b.jsonl' layout.tp=2 --nproc=2 --stride 3 --tasks a,b --include-path d --num-fewshot 0 --limit 1 "
    "--config c.json --source-layout by_head=true --json-key t --tokenizer bytes --json",
    "generate hf -p 'a \"b' -p '--c' --stop '' --temperature 0.7 --top-k 3 --seed -1 --tp 2 --fp8-weights --dtype bf16",
    "serve runs/x --port 0 --token-file t --tp 2 --model-name m",
    "submit my.yaml x=1 --share --no-precompile --module a --module b",
]


@pytest.mark.parametrize("line", LINES)
def test_words_mean_the_same_command_without_launch_options(line: str) -> None:
    name, *words = shlex.split(line)
    command = load_command(name)
    given = command.make_context(name, list(words))
    first, *again = command_words(given, {})
    assert first == name
    found = command.make_context(name, list(again)).params
    defaults = command.make_context(name, ["x"]).params
    expected = {key: defaults[key] if key in LAUNCH_OPTIONS else value for key, value in given.params.items()}
    assert found == expected


def test_changed_values_replace_those_of_the_command_line() -> None:
    context = load_command("eval").make_context("eval", ["s3://b/x", "d.jsonl", "--nproc", "2", "--tokenizer", "t"])
    changes = {"checkpoint": "/tmp/x", "arguments": ["/c/d.jsonl", "a.b=1"], "tokenizer": None}
    assert command_words(context, changes) == ["eval", "/tmp/x", "/c/d.jsonl", "a.b=1"]
