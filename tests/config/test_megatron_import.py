"""Import of Megatron-LM's launch scripts and flags. Scripts are parsed, never run."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.config.conftest import RunMain
from tests.support.examples import examples
from trainyard.cli.run_config import validate_imported
from trainyard.config.load import load, parse
from trainyard.config.schema import Config
from trainyard.config.schema_docs import schema_keys, without_tags
from trainyard.core.errors import UserError
from trainyard.families.builtin.mixtral import MixtralConfig
from trainyard.importers.megatron.convert import import_flags, import_script
from trainyard.importers.megatron.keys import MEGATRON_FLAGS
from trainyard.importers.shell.script import UNKNOWN_MARK, read_commands
from trainyard.parallel.layout import Layout

HERE = Path(__file__).parent / "megatron"
SMALL = (
    "--data-path /d/x --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-4"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0"
)


def config_from_flags(flags: str) -> Config:
    return parse(import_flags(f"{SMALL} {flags}".split()).data)


def config_from_script(path: Path, text: str, **variables: str) -> Config:
    path.write_text(text)
    return validate_imported(import_script(path, variables, []))


def last_command(text: str, **variables: str) -> list[str]:
    """The words of the last command of a script."""
    return list(read_commands(text, variables, "x.sh"))[-1].words


def test_reference_script_matches_the_recipe() -> None:
    config = parse(import_script(HERE / "gpt3_6.7B_16_nodes.sh", {}, []).data)
    recipe = load("gpt3-6.7b-16-nodes")
    for section in ("train", "optimizer", "schedule", "precision", "layout", "recompute"):
        assert getattr(config, section) == getattr(recipe, section), section
    assert config.model == recipe.model.model_copy(update={"ffn": 16384})
    assert (config.data.paths, config.data.seq_len) == (recipe.data.paths, recipe.data.seq_len)
    assert config.data.order == "megatron-2023"  # the script has --data-impl
    checkpoint = config.checkpoint
    assert (checkpoint.every, checkpoint.keep, checkpoint.directory) == (2000, 1, "32_layer_chkpt_16")
    assert config.evaluate.every == 0  # --split 100,0,0 holds out no samples


def test_script_with_variables_defaults_arithmetic_and_a_blend() -> None:
    config = parse(import_script(HERE / "gpt_345M_mp.sh", {}, []).data)
    assert (config.model.layers, config.layout.ranks, config.recompute.kind) == (24, 8, "full")
    assert config.data.paths == ("data/my-gpt2_text_document", "data/other_text_document")
    assert (config.data.weights, config.data.order, config.data.split) == ((0.3, 0.7), "megatron", "949,50,1")
    assert (config.checkpoint.resume, config.checkpoint.directory) == ("auto", "checkpoints/345m")
    assert (config.evaluate.every, config.evaluate.batches, config.schedule.warmup_steps) == (1000, 10, 3200)
    assert Layout.from_config(config, 8).dp == 2
    wider = parse(import_script(HERE / "gpt_345M_mp.sh", {"GPUS_PER_NODE": "16"}, ["--num-layers", "8"]).data)
    assert (wider.layout.ranks, wider.model.layers) == (16, 8)


def test_script_with_arrays_and_unknown_arguments() -> None:
    imported = import_script(HERE / "llama_arrays.sh", {}, [])
    assert imported.data["data"]["paths"] == ["$2"]
    assert [line for line in imported.warnings if line.startswith("--data-path: $2 is not known")]
    imported = import_script(HERE / "llama_arrays.sh", {"DATA_PATH": "/d/x"}, [])
    config = parse(imported.data)
    assert (config.model.family, config.model.num_kv_heads, config.model.vocab, config.model.tie_embeddings) == (
        "llama",
        8,
        128256,
        False,
    )
    assert (config.model.rope_theta, config.layout.ranks, config.layout.zero) == (500000.0, 16, 1)
    assert (config.recompute.kind, config.data.paths) == ("attention", ("/d/x",))
    assert any("--save: $1 is not known" in line for line in imported.warnings)


MAPPED = [
    ("", {"model.vocab": 50257, "model.activation": "gelu_tanh", "model.hidden_dropout": 0.1, "model.ffn": 256}),
    (
        "",
        {"schedule.kind": "linear", "optimizer.beta2": 0.999, "optimizer.weight_decay": 0.01, "data.split": "969,30,1"},
    ),
    ("", {"precision.kind": "fp32", "layout.zero": 0, "checkpoint.keep": 0, "train.seed": 1234}),
    ("--no-bias-gelu-fusion", {"model.activation": "gelu"}),
    ("--no-bias-gelu-fusion --openai-gelu", {"model.activation": "gelu_tanh"}),
    ("--bf16", {"precision.kind": "bf16"}),
    ("--fp16 --loss-scale-window 500", {"precision.kind": "bf16"}),
    ("--fp16 --fp8-format hybrid", {"precision.kind": "fp8"}),
    ("--rampup-batch-size 16 16 5859375", {"train.global_batch": 8}),
    ("--bf16 --fp8-format hybrid", {"precision.kind": "fp8"}),
    ("--bf16 --grad-reduce-in-bf16", {"precision.reduce_dtype": "bf16"}),
    ("--lr-decay-style constant --lr-warmup-iters 7", {"schedule.kind": "constant", "schedule.warmup_steps": 7}),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 9", {"schedule.kind": "wsd", "schedule.decay_steps": 9}),
    ("--lr-warmup-fraction .1 --lr-decay-iters 50", {"schedule.warmup_steps": 5, "schedule.decay_steps": 50}),
    ("--lr-warmup-samples 17", {"schedule.warmup_steps": 3}),
    ("--recompute-granularity selective", {"recompute.kind": "attention"}),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {"recompute.kind": "full"}),
    ("--checkpoint-activations", {"recompute.kind": "full"}),
    ("--sequence-parallel", {"layout.sequence_parallel": False}),
    ("--tensor-model-parallel-size 2 --sequence-parallel", {"layout.tp": 2, "layout.sequence_parallel": True}),
    ("--num-layers=8 --pipeline-model-parallel-size=2 --num-layers-per-virtual-pipeline-stage=2", {"layout.vpp": 2}),
    (
        "--reset-position-ids --reset-attention-mask --eod-mask-loss",
        {"data.document_mask": True, "data.mask_eod_loss": True},
    ),
    ("--load /a --save /b --finetune", {"checkpoint.init_from": "/a", "checkpoint.directory": "/b"}),
    ("--eval-interval 10 --eval-iters 3", {"evaluate.every": 10, "evaluate.batches": 3}),
    ("--eval-interval 1000", {"evaluate.every": 0}),
    ("--min-lr -0", {"schedule.min_lr": 0.0}),
    (f"{LLAMA} --rotary-base 20000 --use-rope-scaling", {"model.family": "llama", "model.rope_theta": 20000.0}),
    (
        f"{LLAMA} --group-query-attention --num-query-groups 2 --kv-channels 8",
        {"model.kv_heads": 2, "model.head_dim": 8},
    ),
]


@pytest.mark.parametrize(("flags", "expected"), MAPPED, ids=[case[0] or "defaults" for case in MAPPED])
def test_flags_map_to_keys(flags: str, expected: dict[str, object]) -> None:
    config = config_from_flags(flags)
    for dotted, value in expected.items():
        section, name = dotted.split(".")
        assert getattr(getattr(config, section), name) == value, dotted


def test_steps_from_samples_and_global_batch_from_ranks(tmp_path: Path) -> None:
    flags = SMALL.replace("--train-iters 100", "--train-samples 100").replace("--global-batch-size 8", "")
    text = f"torchrun --nproc_per_node=4 --nnodes 2 pretrain_gpt.py {flags} --tensor-model-parallel-size 2"
    config = config_from_script(tmp_path / "x.sh", text)
    assert (config.train.global_batch, config.train.steps, config.layout.ranks) == (4, 25, 8)


def test_script_with_placeholders() -> None:
    """A shell takes <Specify path> for redirections. The text stays in the file for the user to replace."""
    imported = import_script(HERE / "gpt_placeholders.sh", {}, [])
    config = validate_imported(imported)
    assert config.data.paths == ("<Specify path and file prefix>_text_document",)
    assert (config.data.vocab_file, config.data.merges_file) == ("<path to vocab>/vocab.json", "merges.txt")
    assert (config.layout.ranks, config.precision.kind, config.checkpoint.directory) == (8, "bf16", None)
    assert "--fp16: imported as bf16, which has the range of fp32 and needs no loss scaling" in imported.warnings
    known = {"DATA_PATH": "/d/x", "CHECKPOINT_PATH": "/c"}
    config = validate_imported(import_script(HERE / "gpt_placeholders.sh", known, []))
    assert (config.data.paths, config.checkpoint.directory, config.checkpoint.resume) == (("/d/x",), "/c", "auto")


def test_script_that_gives_its_command_to_srun() -> None:
    """The command is one word, a variable, and sbatch's options have the number of ranks."""
    imported = import_script(HERE / "gpt_srun.sh", {}, [])
    config = validate_imported(imported)
    assert (config.model.layers, config.train.steps, config.layout.tp, config.layout.pp) == (8, 100, 2, 2)
    assert (config.layout.ranks, config.hardware) == (32, "32 x h100")
    assert config.data.paths == ("<PATH TO THE FIRST DATASET>", "<PATH TO THE SECOND DATASET>")
    assert (config.data.weights, config.recompute.kind) == ((0.3, 0.7), "full")
    assert any(line.startswith("--rampup-batch-size=['4', '4', '100']: no effect here") for line in imported.warnings)


@pytest.mark.parametrize(
    "command",
    [
        "srun bash -c 'cd /x && torchrun --nproc_per_node 4 pretrain_gpt.py $FLAGS'",
        'srun sh -c "export A=1; python -u $(pwd)/pretrain_gpt.py ${FLAGS}"',
        "srun --ntasks-per-node=4 bash -lc \"python pretrain_gpt.py $FLAGS --save '/a b/c'\"",
        'RUN="python pretrain_gpt.py ${FLAGS}"\neval $RUN',
        'RUN="\n  torchrun --nproc_per_node 4 pretrain_gpt.py \\\n  ${FLAGS}\n"\nRUN="$RUN |& tee $LOG"\neval $RUN',
    ],
)
def test_commands_of_a_shell_inside_a_command(command: str, tmp_path: Path) -> None:
    config = config_from_script(tmp_path / "x.sh", f"export FLAGS='{SMALL} --seed 7'\n{command}\n")
    assert (config.model.layers, config.train.seed) == (2, 7)
    assert config.layout.ranks == (4 if "4" in command else None)
    assert config.checkpoint.directory == ("/a b/c" if "/a b/c" in command else None)


def test_shell_text_that_cannot_be_read_is_no_training_command(tmp_path: Path) -> None:
    text = f"srun bash -c 'echo \"'\npython pretrain_gpt.py {SMALL}\n"
    assert config_from_script(tmp_path / "x.sh", text).model.layers == 2


def test_mixtral() -> None:
    """The auxiliary loss has another scale there; an unknown tokenizer has the vocabulary of the published model."""
    imported = import_script(HERE / "mixtral.sh", {}, [])
    config = validate_imported(imported)
    model = config.model
    assert isinstance(model, MixtralConfig)
    assert (model.family, model.experts, model.top_k, model.ffn, model.vocab) == ("mixtral", 8, 2, 14336, 32000)
    assert (model.balance_loss, model.normalize_top_k, model.capacity_factor) == (pytest.approx(0.16), True, None)
    assert (config.layout.ep, config.data.paths, config.data.tokenizer) == (8, ("$3",), "$2")
    assert "model.vocab: 32000, that of Mixtral 8x7B, which has these sizes" in imported.warnings
    flags = f"{LLAMA} --num-experts 4 --moe-router-pre-softmax --moe-z-loss-coeff 1e-3 --moe-ffn-hidden-size 96 "
    flags += "--moe-layer-freq 1 --expert-tensor-parallel-size 1 "
    other = config_from_flags(flags + "--moe-router-load-balancing-type none --moe-expert-capacity-factor 1.5").model
    assert isinstance(other, MixtralConfig)
    assert (other.ffn, other.z_loss, other.capacity_factor, other.balance_loss) == (96, 1e-3, 1.5, 0.0)
    assert not other.normalize_top_k


def test_auxiliary_loss_of_megatron() -> None:
    """The imported coefficient gives what megatron-core computes: a sum over layers of E f P, f divided by top-k."""
    layers, experts, top_k, tokens, coefficient = 3, 4, 2, 50, 0.01
    torch.manual_seed(0)
    probabilities = torch.randn(layers, tokens, experts).softmax(-1)
    counts = torch.zeros(layers, tokens, experts).scatter(-1, probabilities.topk(top_k).indices, 1.0)
    scale = experts * coefficient / (top_k * tokens * tokens)
    theirs = sum((probabilities[i].sum(0) * counts[i].sum(0)).sum() * scale for i in range(layers))
    flags = f"{LLAMA} --num-layers {layers} --num-experts {experts} --moe-router-topk {top_k}"
    model = config_from_flags(f"{flags} --moe-aux-loss-coeff {coefficient}").model
    assert isinstance(model, MixtralConfig)
    per_layer = [experts * (counts[i].mean(0) * probabilities[i].mean(0)).sum() for i in range(layers)]
    assert model.balance_loss * sum(per_layer) / layers == pytest.approx(theirs)


def test_all_refused_flags_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        import_script(HERE / "llama3_conditions.sh", {}, ["--not-a-flag", "1", "2"], ["manual-gc"])
    message = str(caught.value)
    for flag in ("apply-layernorm-1p", "decoupled-lr", "decoupled-min-lr", "not-a-flag"):
        assert message.count(f"--drop-flag {flag}") == 1
    options = message.partition("(to leave them out: ")[2].removesuffix(")").split()
    assert "--normalization=LayerNorm: not supported with --swiglu" in message
    dropped = options[1::2]
    assert dropped[0] == "manual-gc"
    flags = ["--not-a-flag", "1", "2", "--normalization", "RMSNorm"]
    assert validate_imported(import_script(HERE / "llama3_conditions.sh", {}, flags, dropped)).model.family == "llama"


UNSUPPORTED_IN_LLAMA3 = ["apply-layernorm-1p", "--decoupled-lr", "decoupled-min-lr"]


def test_script_that_checks_its_program_and_sets_flags_under_conditions() -> None:
    """`[ ! -f pretrain_gpt.py ]` was taken for the training command; flags under `if` were dropped without a word."""
    script, flags = HERE / "llama3_conditions.sh", ["--normalization", "RMSNorm"]
    imported = import_script(script, {}, flags, UNSUPPORTED_IN_LLAMA3)
    config = parse(imported.data)
    assert (config.model.family, config.model.vocab, config.train.steps) == ("llama", 128256, 15258790)
    assert (config.precision.kind, config.precision.reduce_dtype, config.layout.ranks) == ("fp8", "bf16", 16)
    assert (config.data.source, config.data.paths, config.hardware) == ("synthetic", (), "16 x h100")
    assert [line for line in imported.warnings if line.startswith("line 83: TRAINING_ARGS")]
    assert not [line for line in imported.warnings if "DTYPE_ARGS" in line or "DATA_ARGS" in line]
    variables = {"DATA_ARG": "/d/x", "TOKENIZER_ARG": "tokenizer.json", "DTYPE": "bf16"}
    config = parse(import_script(script, variables, flags, UNSUPPORTED_IN_LLAMA3).data)
    assert (config.data.source, config.data.paths, config.data.split) == ("tokens", ("/d/x",), "99,1,0")
    assert config.precision.kind == "bf16"


@pytest.mark.parametrize(
    ("flags", "dropped"),
    [
        ("--qk-layernorm --lr 1e-4", ["qk-layernorm"]),
        ("--qk-layernorm", ["--qk-layernorm"]),
        ("--rampup-batch-size 16 16 5859375 --lr 1e-4", ["rampup-batch-size"]),
        ("--not-a-flag 1 two --qk-layernorm", ["not-a-flag", "qk-layernorm"]),
    ],
)
def test_dropped_flags_are_left_out_with_their_values_and_reported(flags: str, dropped: list[str]) -> None:
    words = f"{SMALL} {flags}".split()
    imported = import_flags(words, dropped)
    assert parse(imported.data) == config_from_flags("")
    outcomes = {outcome.source_key: outcome.outcome for outcome in imported.outcomes}
    assert all(outcomes[f"--{flag.removeprefix('--')}"] == "dropped by --drop-flag" for flag in dropped)
    with pytest.raises(UserError, match=r"--drop-flag seeed: the command has no such flag; nearest: seed"):
        import_flags([*SMALL.split(), "--seed", "1"], ["seeed"])


@pytest.mark.parametrize(
    ("launcher", "hardware"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4", "32 x h100"),
        ("torchrun --nproc_per_node 2", "2 x h100"),
        ("torchrun --nproc_per_node=32 --nnodes=16", "16 x trn1.32xlarge"),
        ("torchrun --nproc_per_node 12", ""),
        ("python", ""),
    ],
)
def test_hardware_comes_from_the_launcher(launcher: str, hardware: str, tmp_path: Path) -> None:
    """`plan` of an imported file used this CPU, because the file named no hardware."""
    assert config_from_script(tmp_path / "x.sh", f"{launcher} pretrain_gpt.py {SMALL}").hardware == hardware


MISTAKES = [
    ("--num-layrs 3", ["--num-layrs", "unknown flag", "nearest: --num-layers"]),
    ("--num-layers three", ["--num-layers=three", "not a whole number"]),
    ("--num-layers", ["--num-layers", "needs a value"]),
    ("--bf16=yes", ["--bf16=yes", "takes no value"]),
    ("word", ["expected a flag"]),
    ("--num-experts 8", ["--num-experts=8", "nearest: --swiglu"]),
    (
        f"{LLAMA} --num-experts 8 --moe-router-load-balancing-type sinkhorn",
        ["--moe-router-load-balancing-type=sinkhorn", "nearest: aux_loss"],
    ),
    (
        "--moe-layer-freq ([0]+[1]*3) --expert-tensor-parallel-size 2",
        ["--moe-layer-freq", "--expert-tensor", "to leave them"],
    ),
    ("--squared-relu --qk-layernorm", ["--drop-flag squared-relu --drop-flag qk-layernorm)"]),
    ("--num-layers $N", ["$N"]),
    ("--optimizer sgd", ["--optimizer=sgd", "nearest: adam"]),
    ("--lr-decay-style inverse-square-root", ["inverse-square-root", "nearest: cosine"]),
    ("--swiglu", ["--normalization=LayerNorm", "nearest: RMSNorm"]),
    ("--normalization RMSNorm", ["--normalization=RMSNorm", "nearest: LayerNorm"]),
    (f"{LLAMA} --hidden-dropout 0.1", ["--hidden-dropout=0.1", "nearest: --hidden-dropout 0"]),
    ("--group-query-attention --num-query-groups 2", ["--num-query-groups=2", "nearest: leave it out"]),
    ("--activations-checkpoint-method block", ["--activations-checkpoint-method=block", "nearest: uniform"]),
    ("--fp8-format e4m3", ["--fp8-format=e4m3", "nearest: hybrid"]),
    ("--reset-position-ids", ["--reset-attention-mask", "nearest: both"]),
    ("--data-path 0.5 /a /b", ["--data-path", "weights"]),
    ("--data-path", ["--data-path=null"]),
    ("--batch-size 3", ["--batch-size=3", "nearest: --micro-batch-size"]),
    ("--num-layers-per-virtual-pipeline-stage 0.5", ["not a whole number"]),
    ("--num-layers-per-virtual-pipeline-stage 5", ["does not divide 2 layers"]),
    ("--seed 1e400", ["--seed", "not a whole number"]),
    ("--lr inf", ["--lr=inf", "sensible size"]),
]


@pytest.mark.parametrize(("flags", "expected"), MISTAKES, ids=[case[0] for case in MISTAKES])
def test_mistake_is_reported_on_one_line(flags: str, expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config_from_flags(flags)
    assert "\n" not in str(caught.value)
    for part in expected:
        assert part in str(caught.value), caught.value


def test_flag_table_targets_exist_in_the_schema() -> None:
    keys = {without_tags(key.name) for key in schema_keys()} | {"model.rope_scaling"}
    for flag, rule in MEGATRON_FLAGS.items():
        if rule.action in ("copied", "maps"):
            assert set(rule.target.split(", ")) <= keys, flag


SHELL = [
    # script, words of its last command
    ("X=1; echo $X ${X} '$X' \"$X\" \\$X", ["echo", "1", "1", "$X", "1", "$X"]),
    ("X='a  b'\necho $X \"$X\"", ["echo", "a", "b", "a  b"]),
    ('echo ${X:-d} ${X-d} ${X:="q r"}', ["echo", "d", "d", "q", "r"]),
    ('X=\necho ${X:-d} "${X-d}"', ["echo", "d", ""]),
    ("Y=2\necho ${X:-${Y}3}", ["echo", "23"]),
    ("N=7\necho $((N*2 + 1)) $(( $N / 2 )) $((-N % 4))", ["echo", "15", "3", "-3"]),
    ("A=(1 2 # two\n 3)\nA+=(4)\necho ${A[@]} $A", ["echo", "1", "2", "3", "4", "1"]),
    ("X=a\nX+=b\necho $X", ["echo", "ab"]),
    ("echo a\\\n  b c#d # e", ["echo", "a", "b", "c#d"]),
    ("X=1\nif true; then X=2; fi\necho $X", ["echo", "1"]),
    ("X=1\nf() {\n X=2\n}\n[ -z 1 ] && X=3\ncase a in b) X=4;; esac\necho $X", ["echo", "1"]),
    ("X=1\nif [ a = b ]; then X=2; else X=3; fi\necho $X", ["echo", "3"]),
    ('M=x\nif [[ $M == x ]] && [[ -n "$M" ]]; then X=2; fi\necho $X', ["echo", "2"]),
    ("N=4\nif [ $N -gt 4 ]; then X=2\nelif [ $N -eq 4 ]; then X=5; else X=6; fi\necho $X", ["echo", "5"]),
    ('if [ -z $X ]; then X=2; fi\nif [ ! -z "$X" ]; then X=7; fi\necho $X', ["echo", f"{UNKNOWN_MARK}X{UNKNOWN_MARK}"]),
    ("X=1\nif [ -f /etc/passwd ] || [ a = b ]; then X=2; else X=3; fi\necho $X", ["echo", "1"]),
    ("X=1\nif ! [ a = b ]; then X=2; fi\necho $X", ["echo", "1"]),
    ("X=1\nif [ a = b ]; then if [ a = a ]; then X=2; fi; X=3; fi\necho $X", ["echo", "1"]),
    ("X=1\nif [[ ab == a* ]]; then X=2; fi\necho $X", ["echo", "1"]),
    ("export X=1 Y=2\nreadonly Z=3\necho $X$Y$Z", ["echo", "123"]),
    ("cat <<EOF\nX=1 'not closed\nEOF\necho a > out 2>&1", ["echo", "a"]),
    ("X=1 Y=2 run $X", ["run", "1"]),
    ("echo a | tee $(date) b", ["tee", f"{UNKNOWN_MARK}$(date){UNKNOWN_MARK}", "b"]),
    ("echo $UNSET x$1", ["echo", f"{UNKNOWN_MARK}UNSET{UNKNOWN_MARK}", f"x{UNKNOWN_MARK}1{UNKNOWN_MARK}"]),
    (
        "echo $((1/0)) $((2**99)) $((A+1))",
        ["echo", *(f"{UNKNOWN_MARK}$(({sum})){UNKNOWN_MARK}" for sum in ("1/0", "2**99", "A+1"))],
    ),
]


@pytest.mark.parametrize(("text", "expected"), SHELL, ids=[case[0][:40] for case in SHELL])
def test_shell_expansion(text: str, expected: list[str]) -> None:
    assert last_command(text) == expected


def test_preset_variables_win() -> None:
    assert last_command("X=1\necho $X", X="2") == ["echo", "2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo 'a", "x.sh:1: unclosed quote"),
        ('a\necho "b', "x.sh:2: unclosed quote"),
        ("echo ${a", "unclosed ${"),
        ("python pretrain_gpt.py $FLAGS", "--lr: missing; needed: the peak learning rate ($FLAGS is not known"),
        ("echo hello", "no command runs pretrain_gpt.py"),
        ("torchrun pretrain_bert.py --num-layers 2", "bert-large-phase1"),
        ("X=aaaaaaaaaa\n" + "X=$X$X\n" * 40 + "echo $X", "exceeds 1000000 characters"),
    ],
)
def test_unreadable_script_is_reported_on_one_line(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        config_from_script(tmp_path / "x.sh", text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_hostile_script_does_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    text = f"touch {trace}\nX=$(touch {trace})\nY=`touch {trace}`\neval touch {trace}\n"
    config_from_script(
        tmp_path / "x.sh",
        text + f"torchrun --nproc_per_node 1 pretrain_gpt.py {SMALL} $(touch {trace}) ; touch {trace}\n",
    )
    assert not trace.exists()


FRAGMENTS = "$ ${ } $(( )) $( ) ( ' \" \\ ` # <<E | && ; > A= A+= A=( $A ${A[@]} ${A:- 1 * / 0 if fi -- = x"
TOKENS = st.sampled_from(FRAGMENTS.split(" "))
TEXTS = st.sampled_from(
    ["\n", " ", "E\n", "fi\n", "torchrun ", "pretrain_gpt.py ", SMALL, "--lr ", "--bf16 ", "\0", "é"]
)


@examples(400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fragments=st.lists(TOKENS | TEXTS, max_size=25))
def test_any_script_imports_or_fails_on_one_line(fragments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "fuzz.sh"
    lines: list[str] = []
    try:
        config_from_script(path, "".join(fragments))
    except UserError as error:
        lines = [str(error)]
    assert not any("\n" in line for line in lines)
    assert [file.name for file in tmp_path.iterdir()] == ["fuzz.sh"]


@examples(300)
@given(
    flags=st.lists(
        st.sampled_from([f"--{name}" for name in MEGATRON_FLAGS])
        | st.sampled_from(
            ["0", "1", "-1", "2.5", "1e999", "nan", "x", "full", "", "0.5", "/a", "a,b", "=", UNKNOWN_MARK]
        )
        | st.text(max_size=4),
        max_size=8,
    )
)
def test_any_flags_import_or_fail_on_one_line(flags: list[str]) -> None:
    lines: list[str] = []
    try:
        lines = import_flags([*SMALL.split(), *flags]).warnings
    except UserError as error:
        lines = [str(error)]
    assert not any("\n" in line for line in lines)


def test_import_command_takes_scripts_variables_keys_and_flags(tmp_path: Path, run_main: RunMain) -> None:
    target = tmp_path / "ours.yaml"
    command = ["import", str(HERE / "llama_arrays.sh"), "DATA_PATH=/d/y", "train.seed=7", "-o", str(target)]
    done = run_main([*command, "--", "--num-layers", "4"])
    assert (done.returncode, done.stdout) == (0, "")
    config = load(target)
    assert (config.data.paths, config.train.seed, config.model.layers) == (("/d/y",), 7, 4)
    assert "--swiglu = true" in done.stderr
    done = run_main(["import", "--", *SMALL.split()])
    assert done.returncode == 0
    (tmp_path / "flags.yaml").write_text(done.stdout)
    assert load(tmp_path / "flags.yaml") == config_from_flags("")
    done = run_main(["import", "--", "--num-layrs", "4"])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
