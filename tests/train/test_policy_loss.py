"""Completions to which no reward applies: they are compared with nothing, and still count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainyard.config.rollout_schema import PolicySection, RolloutSection
from trainyard.core.constants import IGNORE_INDEX
from trainyard.train.objectives.grpo import Grpo
from trainyard.train.objectives.rloo import Rloo

NAN = float("nan")


@pytest.mark.parametrize("kind", [Grpo, Rloo])
def test_no_reward_is_no_advantage(kind: Any) -> None:
    loss = kind(None, PolicySection(), RolloutSection())
    with_others = loss.advantages(torch.tensor([[1.0, NAN, 3.0, 0.5], [NAN] * 4]))
    alone = loss.advantages(torch.tensor([[1.0, 3.0, 0.5]]))
    assert with_others[0, [0, 2, 3]].tolist() == alone[0].tolist()
    assert with_others[0, 1] == 0
    assert with_others[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize(("average", "count"), [("tokens", 5), ("completions", 2), ("max_tokens", 2)])
def test_completions_without_a_reward_count_and_their_kl_trains(kl: float, average: str, count: int) -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -1.5], [-0.5, -3.0, 0.0]], requires_grad=True)

    class Counted(Grpo):
        calls = 0

        def token_weights(self, labels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().token_weights(labels)

    head: Any = lambda output, labels, per_token: -log_probs  # noqa: E731
    loss = Counted(head, PolicySection(kl=kl, average=average), RolloutSection(max_new_tokens=4))
    batch = {
        "labels": torch.tensor([[3, 4, 5], [6, 7, IGNORE_INDEX]]),
        "old_log_probs": log_probs.detach().clone(),
        "reference_log_probs": log_probs.detach() - 1,
        "advantages": torch.tensor([1.0, 0.0]),
        "completion_stats": torch.tensor([[1.0, 1.0], [NAN, 1.0]]),
    }
    assert loss.stat_names == ("rewards/total", "completions/finished")
    output: Any = SimpleNamespace(at_temperature=lambda temperature: None)
    terms = loss.terms(output, batch)
    assert loss.calls == 1
    assert terms["policy"][1] == count == loss.label_counts(batch)[0]
    assert [float(value) for value in terms["rewards/total"]] == [1.0, 1.0]
    terms["policy"][0].backward()
    assert log_probs.grad is not None
    assert bool(log_probs.grad[1, :2].any()) == bool(kl)
    assert log_probs.grad[0].all()
