"""Generated bad inputs: values of keys, damaged files, and command lines."""

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzer import Fuzzer
from tests.support.file_damage import EDITS, mutate
from trainyard.cli.main import COMMANDS as ALL_COMMANDS
from trainyard.cli.main import load_command
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.config.schema_docs import schema_keys, without_tags

VALUES: dict[str, tuple[str, ...]] = {
    "empty": ("", "''", "~"),
    "word": ("abc", "auto", "None", "yes please"),
    "boolean": ("true", "no"),
    "zero": ("0", "0.0", "-0"),
    "negative": ("-1", "-3.5", "-9223372036854775809"),
    "fraction": ("0.5", "2.0000001", "1e-30"),
    "huge": ("1000000000000", "1e300", "100000000000000000000000000000000"),
    "not finite": (".nan", ".inf", "-.inf", "nan"),
    "list": ("[]", "[1, 2]", "[[a], {b: c}]", "[null]"),
    "mapping": ("{}", "{a: 1}", "{kind: {kind: kind}}", "{1: 2}"),
    "text": ("é漢字🙂", "a b\tc", "x" * 5000, "$(id)", "../..", "\\x00\\x1b[2J"),
    "yaml": ("[1, 2", "!!python/name:os.system", "&a [*a]", "2026-11-18", "0x1F", "'"),
    "path": ("/", "/dev/null", "s3://", "nothing.here:f", "os:getcwd"),
}
"""Kinds of bad values, as text of an override."""

JSON_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), -1e300),
    *("", "a", "é" * 1000, "../../etc/passwd", [], [[]], {}, {"a": None}, [1, "b"]),
)


@cache
def keys() -> list[tuple[str, str]]:
    """Every key of the schema with a recipe that has it."""
    recipes: dict[str, str] = {}
    for name in recipe_names():
        recipes.setdefault(load(name).model.family, name)
    found = []
    for doc in schema_keys():
        family = doc.name.partition("[")[2].partition("]")[0] if doc.name.startswith("model[") else "llama"
        if family in recipes:
            found.append((without_tags(doc.name), recipes[family]))
    return found


def key_inputs() -> Iterator[tuple[str, str, str]]:
    """Every key with every kind of value: recipe, override, and `--smoke` or nothing."""
    for number, (key, recipe) in enumerate(keys()):
        for kind, values in enumerate(VALUES.values()):
            for smoke in ("", "--smoke"):
                value = values[(number + kind + bool(smoke)) % len(values)]
                yield recipe, f"{key}={value}", smoke


def run_key(fuzzer: Fuzzer, case: tuple[str, str, str]) -> None:
    recipe, override, smoke = case
    if not fuzzer.scratch.is_dir():
        fuzzer.directory()
    fuzzer.run(["config", recipe, override, *filter(None, [smoke])])


@dataclass(frozen=True)
class Reader:
    """A command that reads a file of the corpus."""

    source: str
    """File or directory of the corpus that the command takes."""
    damaged: str
    """Pattern of the files below it that are damaged; empty: `source` itself."""
    command: tuple[str, ...]
    """With `@` for the path."""


READERS = {
    "idx": Reader("tokens.idx", "", ("data", "inspect", "@", "--check")),
    "bin": Reader("tokens.bin", "", ("data", "inspect", "@", "--check")),
    "json lines": Reader("text.jsonl", "", ("data", "inspect", "@", "--check")),
    "json lines, tokenized": Reader(
        "text.jsonl", "", ("data", "tokenize", "--input", "@", "--output-prefix", "o", "--tokenizer", "bytes")
    ),
    "parquet": Reader("text.parquet", "", ("data", "inspect", "@", "--check")),
    "arrow": Reader("packed", "*", ("data", "inspect", "@", "--check")),
    "hdf5": Reader("bert.hdf5", "", ("data", "inspect", "@", "--check")),
    "safetensors": Reader("hf", "*.safetensors", ("inspect", "@", "--check")),
    "config.json": Reader("hf", "config.json", ("config", "tiny-llama", "model.from_hf=@")),
    "config.json with weights": Reader("hf", "config.json", ("inspect", "@", "--check")),
    "tokenizer.json": Reader("hf", "tokenizer.json", ("generate", "@", "-p", "a b", "-n", "2")),
    "tokenizer_config.json": Reader("hf", "*_config.json", ("generate", "@", "--chat", "-p", "a", "-n", "2")),
    "torch files": Reader("nxd", "**/*.pt", ("inspect", "@", "--check")),
    "native shard": Reader("run", "checkpoints/*/*.safetensors", ("inspect", "@", "--check")),
    "native manifest": Reader("run", "checkpoints/*/*.json", ("inspect", "@", "--check")),
    "run": Reader("run", "*.*", ("report", "@", "--no-plan", "--out", "r.html")),
    "yaml": Reader("own.yaml", "", ("config", "@")),
    "NxD Training's yaml": Reader("hf_llama3_8B.yaml", "", ("import", "@")),
    "Megatron-LM's script": Reader("gpt_345M_mp.sh", "", ("import", "@")),
}


@st.composite
def json_damage(draw: Callable[..., Any], text: bytes) -> bytes:
    """Replace, remove or duplicate one value anywhere in a JSON document."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    node, parents = document, []
    while isinstance(node, dict | list) and node and (not parents or draw(st.booleans())):
        key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        parents.append((node, key))
        node = node[key]
    if parents:
        parent, key = parents[-1]
        if draw(st.integers(0, 3)):
            parent[key] = draw(st.sampled_from(JSON_VALUES))
        else:
            del parent[key]
    return json.dumps(document).encode()


@st.composite
def template_damage(draw: Callable[..., Any]) -> bytes:
    """A chat template of random pieces, some of them hostile."""
    pieces = (
        *("{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content * 10 }}", "{{ 1 / 0 }}", "{{"),
        *(
            "{% if tools %}",
            "{% endif %}",
            "{{ ''.__class__.__mro__ }}",
            "{{ range(10**9) | list }}",
            "{% include 'x' %}",
        ),
        *("{{ raise_exception('no') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'a' * 10**10 }}", "%}"),
        *("{% generation %}", "{% endgeneration %}", "{{ messages[99].content }}", "\0", "é", "{# ", "{{ 9**9**9 }}"),
    )
    return "".join(draw(st.lists(st.sampled_from(pieces), max_size=6))).encode()


def damaged_file(data: st.DataObject, path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".json" and data.draw(st.booleans(), "as JSON"):
        return data.draw(json_damage(content))
    return mutate(content, data.draw(EDITS, path.name))


def run_reader(fuzzer: Fuzzer, data: st.DataObject | None, name: str) -> int:
    """Damage a file, unless `data` is None, and read it. Damage may be harmless, so any exit code will do."""
    reader = READERS[name]
    target = fuzzer.copy(reader.source)
    if data:
        paths = sorted(path for path in target.glob(reader.damaged) if path.is_file()) if reader.damaged else [target]
        path = data.draw(st.sampled_from(paths), "file")
        damaged = damaged_file(data, path)
        path.unlink()  # a link to the corpus
        path.write_bytes(damaged)
    return fuzzer.run([part.replace("@", str(target)) for part in reader.command])


def run_template(fuzzer: Fuzzer, data: st.DataObject) -> None:
    target = fuzzer.copy("hf")
    (target / "chat_template.jinja").write_bytes(data.draw(template_damage(), "template"))
    fuzzer.run(["generate", str(target), "--chat", "-p", "a", "-n", "2"])


ENVIRONMENTS: tuple[dict[str, str], ...] = (
    *({}, {"COLUMNS": "0"}, {"COLUMNS": "x"}, {"HOME": "/nonexistent"}, {"HOME": ""}, {"TMPDIR": "/nonexistent"}),
    *({"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "/dev/null"}, {"LANG": "C", "PYTHONIOENCODING": "ascii"}),
    *({"WORLD_SIZE": "abc"}, {"RANK": "1"}, {"WORLD_SIZE": "2", "RANK": "5"}, {"LOCAL_RANK": "-1"}, {"PATH": ""}),
    *({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, {"SLURM_JOB_ID": "nope"}, {"MASTER_PORT": "99999999"}),
    *({"HF_ENDPOINT": "nowhere"}, {"HF_HOME": "/proc/1"}, {"AWS_PROFILE": "none"}, {"NO_COLOR": "1"}),
    *({"OMP_NUM_THREADS": "zero"}, {"CUDA_VISIBLE_DEVICES": "99"}, {"NEURON_RT_VISIBLE_CORES": "a-b"}),
)
WORDS = (
    "",
    "nothing",
    "/",
    "-",
    "--",
    "é",
    "a" * 3000,
    "0",
    "-1",
    "1e9",
    "nan",
    "*",
    "[",
    "s3://x/y",
    "http://",
    "a:b",
    "\n",
)


@cache
def command_options(command: str) -> dict[str, tuple[str, ...]]:
    """Options of a command or subcommand ("data pack") by its words."""
    loaded = load_command(command)
    commands = {f"{command} {name}": sub for name, sub in getattr(loaded, "commands", {}).items()} or {command: loaded}
    return {
        words: tuple(name for option in one.params for name in option.opts if name.startswith("-"))
        for words, one in commands.items()
    }


@st.composite
def command_line(draw: Callable[..., Any], command: str, corpus: Path) -> list[str]:
    """A command line with one word at least that is wrong: an option that does not exist, or a file that is no such."""
    words = draw(st.sampled_from(sorted(command_options(command))))
    options = command_options(command)[words]
    files = tuple(str(path) for path in sorted(corpus.iterdir()) if path.suffix not in (".yaml", ".sh"))
    value = st.sampled_from(WORDS + files + tuple(str(path) for path in special_files(corpus.parent)))
    parts = [draw(value) for _ in range(draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(0, 3))):
        parts += [draw(st.sampled_from(options)), draw(value)] if options else []
    wrong = draw(st.sampled_from(["--no-such-option", "-Z", "nothing-here", "nothing.yaml", "=", "a.b=1"]))
    position = draw(st.integers(0, len(parts)))
    return [*words.split(), *parts[:position], wrong, *parts[position:]]


@cache
def special_files(directory: Path) -> list[Path]:
    """Files that are not what a command expects: empty, binary, unreadable, a pipe, a dangling and a looping link."""
    root = directory / "special"
    root.mkdir(exist_ok=True)
    (root / "empty").touch()
    (root / "binary.yaml").write_bytes(bytes(range(256)) * 8)
    (root / "list.yaml").write_text("- 1\n- 2\n")
    (root / "model.yaml").write_text("model: [a, b]\n")
    (root / "anchor.yaml").write_text("model: &a {family: *a}\n")
    if not (root / "fifo.json").exists():
        os.mkfifo(root / "fifo.json")
        (root / "dangling").symlink_to("nowhere")
        (root / "loop").symlink_to("loop")
    return [path for path in sorted(root.iterdir()) if not stat.S_ISFIFO(os.lstat(path).st_mode)]


COMMANDS = [name for name in ALL_COMMANDS if name != "supervise"]  # inside a job only


def run_command(fuzzer: Fuzzer, data: st.DataObject, command: str) -> None:
    arguments = data.draw(command_line(command, fuzzer.corpus), "arguments")
    fuzzer.directory()
    code = fuzzer.run(arguments, data.draw(st.sampled_from(ENVIRONMENTS), "environment"))
    if "--no-such-option" in arguments and not {"--help", "-h", "--"} & {*arguments}:
        assert code == 2, arguments


Case = Callable[[Fuzzer, st.DataObject], object]


def parts() -> dict[str, Case]:
    """What is fuzzed with generated inputs, by name. Keys are not among them: every one is tried (key_inputs)."""
    found: dict[str, Case] = {f"read {name}": partial(run_reader, name=name) for name in READERS}
    found["read chat template"] = run_template
    return found | {f"command {name}": partial(run_command, command=name) for name in COMMANDS}


def explore(fuzzer: Fuzzer, case: Case, count: int, seed_value: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    """Run `count` generated inputs of one part."""

    @seed(seed_value)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=phases)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case(fuzzer, data)

    run()
