"""Loss and gradients of fine-tuning next to those of TRL's SFTTrainer with PEFT: same records, same weights.

    python -m venv trl && trl/bin/pip install torch trl peft
    python bench/trl_parity.py --trl trl/bin/python [--out FILE] [--values FILE]

TRL runs in its own environment. It trains one step on all records of a case and writes the gradients before the update,
the adapters that it started from, and a random model. trainyard reads both folders and trains the same step in fp32.
--values writes a summary of TRL's gradients, with which tests/train/test_trl.py compares without TRL.
"""

import argparse
import json
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
        {%- if not loop.last %}{{ '\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Nothing follows the last answer: of a completion of messages, TRL also trains what follows the end of its turn."""
TALKS = [
    ["Hello", "Hi, what can I do?"],
    ["Name a color.", "Blue.", "Another one?", "Red, or green, or any that you can think of."],
    ["2+2?", "4"],
    ["Say nothing.", "."],
    ["Who wrote this?", "A test did.", "Why?", "To compare.", "With what?", "With TRL."],
    ["Count to five.", "One, two, three, four, five."],
]
MESSAGES = [
    {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]}
    for talk in TALKS
]
TEXTS = [{"prompt": f"{talk[0]}\n", "completion": talk[1]} for talk in TALKS]
TURNS = [{"prompt": each["messages"][:-1], "completion": each["messages"][-1:]} for each in MESSAGES]
PAIRS = [
    {
        "prompt": each["messages"][:-1],
        "chosen": each["messages"][-1:],
        "rejected": [{"role": "assistant", "content": other[-1][:-18:-1] + "!"}],
    }
    for each, other in zip(MESSAGES, TALKS[1:] + TALKS[:1], strict=True)
]
ANSWERS = [
    {"prompt": pair["prompt"], "completion": pair[("chosen", "rejected")[index % 2]], "label": index % 2 == 0}
    for index, pair in enumerate([*PAIRS, *PAIRS[1:]])
]
TEXT_ANSWERS = [{**each, "label": index % 3 > 0} for index, each in enumerate(TEXTS)]
MARGINS = [{**pair, "margin": 0.25 * index} for index, pair in enumerate(PAIRS)]
SEQ_LEN = 144
DPO_VARIANTS = {
    **dict.fromkeys(("sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard"), 0.0),
    **dict.fromkeys(("apo_zero", "apo_down", "discopop"), 0.0),
    **dict.fromkeys(("robust", "exo_pair", "aot", "aot_unpaired"), 0.1),
}
"""Losses of TRL's DPOTrainer, with the label smoothing to compare them at. Not sft, which is
that of fine-tuning."""
CASES: dict[str, dict[str, Any]] = {
    "assistant only": {"records": MESSAGES, "assistant": True},
    "completion only, text": {"records": TEXTS},
    "completion only, messages": {"records": TURNS},
    "gradient accumulation": {"records": MESSAGES, "assistant": True, "micro_batch": 1},
    "packing": {"records": MESSAGES, "assistant": True, "packing": True},
    "LoRA": {"records": MESSAGES, "assistant": True, "lora": {}},
    "rsLoRA": {"records": MESSAGES, "assistant": True, "lora": {"use_rslora": True}},
    "DoRA": {"records": MESSAGES, "assistant": True, "lora": {"use_dora": True}},
    "LoRA, packing": {"records": MESSAGES, "assistant": True, "packing": True, "lora": {}},
    **{
        f"DPO, {variant}": {
            "records": PAIRS,
            "trainer": ("trl", "DPO"),
            "options": {"loss_type": variant, "beta": 0.3, "label_smoothing": smoothing},
            "objective": "dpo",
            "preference": {"variant": variant, "beta": 0.3, "label_smoothing": smoothing},
        }
        for variant, smoothing in DPO_VARIANTS.items()
    },
    **{
        f"CPO, {variant}": {
            "records": PAIRS,
            "trainer": ("trl.experimental.cpo", "CPO"),
            "options": {"loss_type": variant, "beta": 0.3, "label_smoothing": 0.1, "cpo_alpha": 0.7},
            "objective": "cpo",
            "preference": {"variant": variant, "beta": 0.3, "label_smoothing": 0.1, "likelihood_weight": 0.7},
        }
        for variant in ("sigmoid", "hinge", "ipo")
    },
    **{
        name: {
            "records": records,
            "trainer": ("trl", "Reward"),
            "options": {"center_rewards_coefficient": weight},
            "model": "scored",
            "objective": "reward",
            "preference": {"center_weight": weight},
        }
        for name, records, weight in (("reward", PAIRS, 0.0), ("reward, margins, centered", MARGINS, 0.1))
    },
    **{
        f"KTO, {name}": {
            "records": records,
            "trainer": ("trl", "KTO"),
            "model": "reference",  # which finds these answers likelier than the other model does: the KL is positive
            "reference": "model",
            "options": {"loss_type": variant, "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
            "objective": "kto",
            "preference": {"variant": variant, "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
        }
        for name, variant, records in (
            ("kto", "kto", ANSWERS),
            ("apo_zero_unpaired", "apo_zero_unpaired", ANSWERS),
            ("texts", "kto", TEXT_ANSWERS),
        )
    },
    "SimPO": {
        "records": PAIRS,
        "trainer": ("trl.experimental.cpo", "CPO"),
        "options": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
        "objective": "simpo",
        "preference": {"beta": 2.0, "margin": 0.5},
    },
}
"""`micro_batch` defaults to all records, and `lora` has options of PEFT besides those in LORA."""
LORA = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
OUR_OPTIONS = {"use_rslora": "rank_stabilized", "use_dora": "dora"}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def write_model(directory: Path, salt: str = "", scores: bool = False) -> None:
    """A random Llama, or a reward model of that size, and a tokenizer of bytes, the same with every version of every
    library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fast = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    kind = LlamaForSequenceClassification if scores else LlamaForCausalLM
    model = kind(LlamaConfig(vocab_size=len(tokens), num_labels=1 if scores else 2, **SIZES, **ids))
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.data = mean + 0.1 * random_values(salt + name, parameter.shape)
    model.save_pretrained(directory)


def write_models(work: Path) -> None:
    """The models of all cases."""
    write_model(work / "model")
    write_model(work / "reference", "reference ")
    write_model(work / "scored", "scored ", scores=True)


def random_values(name: str, shape: Any) -> Tensor:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    return torch.from_numpy(values).float()


def stored_name(name: str) -> str:
    """The name of a parameter of PEFT in its files."""
    return name.replace(".default", "").replace(".base_layer", "").replace("vector.weight", "vector")


def write_adapter(model: Any, directory: Path, options: dict[str, Any]) -> Any:
    """`model` with an adapter of PEFT that is random in all its parts, and the adapter's folder."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**LORA, **options))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            noise = 0.1 * random_values(stored_name(name), parameter.shape)
            parameter.data = parameter.data * (1 + noise) if "magnitude" in name else noise
    adapted.save_pretrained(directory)
    return adapted


def run_trl(work: Path) -> None:
    """Loss and gradients of every case by TRL, in a process of its own environment."""
    import importlib

    import accelerate
    import peft
    import transformers
    import trl
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    write_models(work)
    losses = {}
    for name, case in CASES.items():
        auto = AutoModelForSequenceClassification if case.get("model") == "scored" else AutoModelForCausalLM
        model = auto.from_pretrained(work / case.get("model", "model"), dtype=torch.float32)
        if "lora" in case:
            model = write_adapter(model, work / "adapters" / name, case["lora"])
        gradients: dict[str, Tensor] = {}
        micro_losses: list[float] = []

        class Recorder(TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, model: Any, gradients: Any = gradients, **kwargs: Any) -> None:
                assert not gradients, "more than one step"
                trained = ((key, each.grad) for key, each in model.named_parameters() if each.requires_grad)
                gradients |= {stored_name(key): gradient.clone() for key, gradient in trained}

        module, kind = case.get("trainer", ("trl", "SFT"))
        library = importlib.import_module(module)

        class Trainer(getattr(library, f"{kind}Trainer")):  # type: ignore[misc]
            def compute_loss(self, *args: Any, micro_losses: list[float] = micro_losses, **kwargs: Any) -> Any:
                loss = super().compute_loss(*args, **kwargs)
                micro_losses.append(float(loss))
                return loss

        records = case["records"]
        micro_batch = case.get("micro_batch", 2 if "packing" in case else len(records))
        of_sft = {"packing": "packing" in case, "assistant_only_loss": "assistant" in case} if kind == "SFT" else {}
        arguments = getattr(library, f"{kind}Config")(
            output_dir=str(work / "trl"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=len(records) // micro_batch,
            num_train_epochs=1,
            max_length=SEQ_LEN,
            **of_sft,
            **case.get("options", {}),
            max_grad_norm=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(work / "model")
        data, reference = Dataset.from_list(records), {}
        if kind in ("DPO", "KTO"):
            path = work / case.get("reference", "reference")
            reference["ref_model"] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        parts = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [Recorder()], **reference}
        Trainer(model, args=arguments, **parts).train()
        save_file({key: value.contiguous() for key, value in gradients.items()}, work / f"{name}.safetensors")
        losses[name] = sum(micro_losses)
    versions = {each.__name__: each.__version__ for each in (trl, peft, transformers, accelerate, torch)}
    (work / "found.json").write_text(json.dumps({"versions": versions, "cases": losses}))


def train_ours(work: Path, name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a case, the latter by the names of transformers and PEFT."""
    from trainyard.config.load import parse
    from trainyard.data.loading.build import build_datasets
    from trainyard.formats.hf import stored_tensors
    from trainyard.formats.peft.adapter import adapter_tensors
    from trainyard.preflight.verify import record_training

    case = CASES[name]
    model = str(work / case.get("model", "model"))
    path = work / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in case["records"]))
    sections: dict[str, Any] = {
        "model": {"from_hf": model},
        "checkpoint": {"init_from": model, "export_hf": False},
        "data": {
            "source": "chat",
            "paths": [str(path)],
            "tokenizer": model,
            "seq_len": SEQ_LEN,
            "packing": "packing" in case,
        },
        "train": {"steps": 1, "global_batch": 1},
        "log": {"loggers": []},
        "device": {"name": "cpu"},
    }
    if "lora" in case:
        chosen = {OUR_OPTIONS[option]: value for option, value in case["lora"].items()}
        folder = str(work / "adapters" / name)
        sections["lora"] = {"rank": LORA["r"], "alpha": LORA["lora_alpha"], **chosen, "init_from": folder}
    if "objective" in case:
        sections["train"]["objective"], sections["preference"] = case["objective"], case["preference"]
        sections["data"] |= {"source": "preference", "seq_len": SIZES["max_position_embeddings"]}
    samples = len(build_datasets(parse(sections)).train)
    micro_batch = 1 if samples % 2 else 2
    sections["train"] |= {"global_batch": samples, "micro_batch": case.get("micro_batch", micro_batch)}
    config = parse(sections)
    if case.get("objective") in ("dpo", "kto"):
        reference = str(work / case.get("reference", "reference"))
        scores = score_reference(parse(sections | {"checkpoint": {"init_from": reference}}))
        record = record_training(config, 1, lambda trainer: setattr(trainer.runner, "add_reference", scores.attach))
    else:
        record = record_training(config, 1)
    (found,) = record.gradients
    stored = adapter_tensors(config.model).stored if "lora" in case else stored_tensors(config.model)
    return record.losses[0], {each.name: torch.cat([found[piece.name] for piece in each.slices]) for each in stored}


def score_reference(config: Any) -> Any:
    """What another model gives the pairs."""
    from trainyard import Trainer
    from trainyard.train.reference_scores import ReferenceScores, score_pairs

    trainer, scores = Trainer(config), ReferenceScores()
    trainer.runner.add_reference = None
    for _ in score_pairs(trainer.runner, trainer.loss_fn, scores, [trainer.loader.batch(0)]):  # type: ignore[arg-type]
        pass
    return scores


def summary(gradients: dict[str, Tensor]) -> dict[str, list[float]]:
    """Two numbers for each tensor: its norm, and its product with a random tensor of norm 1."""
    numbers = {}
    for name, gradient in gradients.items():
        direction = random_values(f"direction of {name}", gradient.shape).double()
        product = (gradient.double() * direction).sum() / direction.norm()
        numbers[name] = [float(f"{value:.8g}") for value in (gradient.double().norm(), product)]
    return numbers


def gradient_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest one, relative to the largest gradient of its tensor."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return rounded(max(float((ours[key] - each).abs().max() / each.abs().max()) for key, each in theirs.items()))


def rounded(difference: float) -> float:
    return float(f"{difference:.2e}")


def compare_cases(
    script: str,
    description: str | None,
    out: str,
    run_trl: Callable[[Path], None],
    compare: Callable[[Path, str, Any], tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    """The command of a script that compares cases with TRL. `run_trl`, in TRL's environment, writes `found.json` with
    versions and what it found in each case; `compare` makes the result of a case, and the values for tests."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0] if description else None)
    parser.add_argument("--trl", type=Path, default="trl/bin/python", help="Python of an environment with TRL and PEFT")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / out)
    parser.add_argument("--values", type=Path, help="write what TRL found here")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        run_trl(options.reference)
        return
    results, values = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        subprocess.run([options.trl, script, "--reference", work], check=True)
        found = json.loads((work / "found.json").read_text())
        for name, theirs in found["cases"].items():
            results[name], values[name] = compare(work, name, theirs)
            print(f"{name}: {results[name]}", flush=True)
    options.out.write_text(json.dumps({"versions": found["versions"], "cases": results}, indent=2) + "\n")
    if options.values:
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        options.values.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare_loss(work: Path, name: str, expected: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """`expected` is TRL's loss."""
    theirs, (loss, gradients) = load_file(work / f"{name}.safetensors"), train_ours(work, name)
    result = {
        "loss": expected,
        "loss_difference": rounded(abs(loss / expected - 1)),
        "gradient_difference": gradient_difference(gradients, theirs),
        "tensors": len(theirs),
    }
    return result, {"loss": expected, "gradients": summary(theirs)}


if __name__ == "__main__":
    compare_cases(__file__, __doc__, "trl-parity.json", run_trl, compare_loss)
