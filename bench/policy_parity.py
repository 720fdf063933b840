"""Advantages, loss and gradients of GRPO and RLOO next to those of TRL, for the same completions and rewards.

    python -m venv trl && trl/bin/pip install torch trl peft
    python bench/policy_parity.py --trl trl/bin/python [--out FILE] [--values FILE]

TRL's trainers run in their own environment, with completions and log-probabilities that they are given instead of those
that they would sample; rewards, advantages, the loss and its gradients are theirs. --values writes what
tests/train/test_trl_policy.py compares with, without TRL.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl_parity import compare_cases, gradient_difference, random_values, rounded, summary, write_model

SEQ_LEN, MAX_NEW_TOKENS, GROUP, TEMPERATURE = 48, 20, 4, 0.7
PROMPTS = ["2+2=", "Name a color:", "Sort 312:"]
LENGTHS = [[5, 20, 9, 1], [20, 3, 14, 7], [2, 11, 20, 6]]
REWARDS = [[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 1.0, -0.5], [0.0, 0.0, 0.0, 0.0]]
"""The last prompt teaches nothing."""
CASES: dict[str, dict[str, Any]] = {
    "GRPO, tokens": {"trl": {"loss_type": "dapo"}, "policy": {}},
    "GRPO, completions": {"trl": {"loss_type": "grpo"}, "policy": {"average": "completions"}},
    "GRPO, max_tokens": {
        "trl": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "policy": {"average": "max_tokens", "scale": "none"},
    },
    "GRPO, batch scale, clip_high": {
        "trl": {"loss_type": "dapo", "scale_rewards": "batch", "epsilon": 0.1, "epsilon_high": 0.28},
        "policy": {"scale": "batch", "clip": 0.1, "clip_high": 0.28},
    },
    "GRPO, kl": {"trl": {"loss_type": "grpo", "beta": 0.3}, "policy": {"average": "completions", "kl": 0.3}},
    "GRPO, ratio of completions": {
        "trl": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
        "policy": {"average": "completions", "ratio": "completion", "clip": 0.02},
    },
    "RLOO": {"trl": {"epsilon": 0.4}, "policy": {"clip": 0.4}, "objective": "rloo"},
}


def completions() -> list[list[int]]:
    """Tokens of each completion, which are no special ones."""
    rng = np.random.default_rng(7)
    return [rng.integers(10, 250, length).tolist() for lengths in LENGTHS for length in lengths]


def given_log_probs(kind: str, base: Tensor) -> Tensor:
    """Log-probabilities [N, C] of a sampler or a reference, near those of the model."""
    return base + 0.15 * random_values(kind, base.shape)


def run_trl(work: Path) -> None:
    import accelerate
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    write_model(work / "model")
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    found: dict[str, Any] = {}
    texts = completions()
    for name, case in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        kind = "RLOO" if case.get("objective") == "rloo" else "GRPO"
        gradients: dict[str, Tensor] = {}
        results: dict[str, Any] = {}

        class Recorder(TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, model: Any, gradients: Any = gradients, **kwargs: Any) -> None:
                gradients |= {key: each.grad.clone() for key, each in model.named_parameters()}

        class Trainer(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
            def _generate(self, prompts: list[Any], *args: Any) -> Any:
                asked = [tokenizer(prompt)["input_ids"] for prompt in prompts]
                decoded = [tokenizer.decode(tokens) for tokens in texts]
                if self.__class__.__mro__[1].__name__ == "RLOOTrainer":
                    return asked, texts, decoded
                return asked, texts, None, decoded, None, {}, None, None

            def _compute_loss(self, model: Any, inputs: Any, results: Any = results) -> Any:
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
                mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
                with torch.no_grad():
                    width = inputs["completion_ids"].shape[1]
                    base, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
                old = given_log_probs("old", base)
                inputs = {**inputs, "old_per_token_logps": old, "ref_per_token_logps": given_log_probs("ref", base)}
                inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1)
                loss = super()._compute_loss(model, inputs)
                rows = zip(inputs["completion_ids"].tolist(), inputs["completion_mask"].sum(1).tolist(), strict=True)
                places = torch.tensor([texts.index(ids[:length]) for ids, length in rows]).argsort()  # TRL shuffles
                results["loss"] = float(loss.detach())
                for key, value in {"advantages": inputs["advantages"], "old": old}.items():
                    results[key] = value[places].tolist()
                results["reference"] = inputs["ref_per_token_logps"][places].tolist()
                return loss

        arguments = getattr(trl, f"{kind}Config")(
            output_dir=str(work / "trl"),
            per_device_train_batch_size=len(PROMPTS) * GROUP,
            num_generations=GROUP,
            max_completion_length=MAX_NEW_TOKENS,
            temperature=TEMPERATURE,
            max_steps=1,
            shuffle_dataset=False,
            max_grad_norm=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **case["trl"],
        )
        flat = iter([value for group in REWARDS for value in group])

        def judge(prompts: Any, flat: Any = flat, **columns: Any) -> list[float]:
            return [next(flat) for _ in prompts]

        data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
        trainer = Trainer(
            model, judge, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Recorder()]
        )
        trainer.train()
        save_file({key: value.contiguous() for key, value in gradients.items()}, work / f"{name}.safetensors")
        found[name] = results
    versions = {each.__name__: each.__version__ for each in (trl, transformers, accelerate, torch)}
    (work / "found.json").write_text(json.dumps({"versions": versions, "cases": found}))


def train_ours(work: Path, name: str, theirs: dict[str, Any]) -> tuple[float, list[float], dict[str, Tensor]]:
    """Loss, advantages and gradients of a case, the latter by the names of transformers."""
    from trainyard.config.load import parse
    from trainyard.formats.hf import stored_tensors
    from trainyard.preflight.verify import record_training
    from trainyard.run.rollouts.rollout import Rollout, RolloutBatch
    from trainyard.run.trainer import Trainer

    case = CASES[name]
    count = len(PROMPTS) * GROUP
    config = parse(
        {
            "model": {"from_hf": str(work / "model")},
            "checkpoint": {"init_from": str(work / "model"), "export_hf": False},
            "data": {"source": "synthetic", "seq_len": SEQ_LEN},
            "train": {
                "objective": case.get("objective", "grpo"),
                "steps": 1,
                "global_batch": count,
                "micro_batch": GROUP,
            },
            "rollout": {"completions": GROUP, "max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE},
            "policy": case["policy"],
            "log": {"loggers": []},
            "device": {"name": "cpu"},
        }
    )
    rollouts: list[Rollout] = []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    references = []
    for number, answer in enumerate(completions()):
        prompt = tokenizer(PROMPTS[number // GROUP])["input_ids"]
        old = theirs["old"][number][: len(answer)]
        references.append([0.0] * len(prompt) + theirs["reference"][number][: len(answer)])
        zeros = [0.0] * len(prompt)
        sampled = [False] * len(prompt) + [True] * len(answer)
        rollouts.append(Rollout(number // GROUP, prompt + answer, zeros + old, sampled))
    rewards = torch.tensor(REWARDS)
    batch = RolloutBatch.join(rollouts, rewards.flatten().numpy(), (0, 1))
    for row, values in zip(batch.reference_log_probs, references, strict=True):
        row[: len(values)] = values
    advantages: list[float] = []

    def plant(trainer: Trainer) -> None:
        advantages.extend(trainer.loss_fn.advantages(rewards).flatten().tolist())  # type: ignore[attr-defined]
        batch.advantages = np.array(advantages, np.float32)
        rows = np.arange(count, dtype=np.int64)
        trainer.runner.add_reference = lambda _: batch.batch(rows, rows, SEQ_LEN)

    record = record_training(config, 1, plant)
    (found,) = record.gradients
    stored = stored_tensors(config.model)
    tensors = {each.name: torch.cat([found[piece.name] for piece in each.slices]) for each in stored}
    return record.losses[0], advantages, tensors


def compare_rollouts(work: Path, name: str, theirs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    expected = load_file(work / f"{name}.safetensors")
    loss, advantages, gradients = train_ours(work, name, theirs)
    result = {
        "loss": theirs["loss"],
        "loss_difference": rounded(abs(loss - theirs["loss"])),
        "advantage_difference": rounded(np.abs(np.array(advantages) - np.array(theirs["advantages"])).max()),
        "gradient_difference": gradient_difference(gradients, expected),
    }
    values = json.dumps({**theirs, "gradients": summary(expected)})
    return result, json.loads(values, parse_float=lambda text: float(f"{float(text):.9g}"))


if __name__ == "__main__":
    compare_cases(__file__, __doc__, "policy-parity.json", run_trl, compare_rollouts)
