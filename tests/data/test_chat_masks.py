"""Tokens of conversations are those of transformers, and what is trained is what the assistant wrote."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.chat_templates import FAMILIES, Family, chat_tokenizer, write_tokenizer
from trainyard.data.formats.conversations import Conversation, read_conversation
from trainyard.data.text.chat_encoder import ChatEncoder, ChatSpec, EncodedConversation
from trainyard.data.text.tokenizer import TokenizerSpec

WORDS = (
    "Hello",
    "yes",
    "  two",
    "12 + 30?",
    "I'm",
    "naïve",
    "日本語",
    "🙂",
    "\n",
    "\n\n",
    "assistant",
    "USER:",
    "<b>",
    "{{ x }}",
    "[x]",
    "user\n",
    "the answer is:",
    "a\tb",
    "<",
    "\\n",
    "'q'",
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def reference(family: Family) -> PreTrainedTokenizerFast:
    names = {"bos_token": family.specials[0], "eos_token": family.specials[1]}
    fast = chat_tokenizer(family.specials, family.sentencepiece)
    tokens = {name: token for name, token in names.items() if token}
    return PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=family.template, **tokens)


def encoder(directory: Path, family: Family, train_on: tuple[str, ...] = ("assistant",)) -> ChatEncoder:
    name = str(write_tokenizer(directory, family))
    return ChatEncoder(ChatSpec(TokenizerSpec(name), None, train_on, "auto"))


def some_text(rng: random.Random) -> str:
    text = "".join(rng.choice((" ", "", "")) + rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
    return text if text.strip() else text + "x"


def some_conversation(rng: random.Random, family: Family) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if family.system and rng.random() < 0.5:
        messages.append({"role": "system", "content": some_text(rng)})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": some_text(rng)})
        if family.tools and rng.random() < 0.4:
            call = {"name": "add", "arguments": {"a": 1, "text": some_text(rng)}}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
            messages.append({"role": "tool", "name": "add", "content": some_text(rng)})
        thought = f"<think>\n{some_text(rng).strip()}\n</think>\n\n" if family.thinks and rng.random() < 0.5 else ""
        messages.append({"role": "assistant", "content": thought + some_text(rng)})
    return messages


def trained_runs(encoded: EncodedConversation, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The texts of what is trained without a gap."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.trained, [0]))))
    runs = edges.reshape(-1, 2).tolist()
    return [tokenizer.decode(encoded.tokens[start:stop], skip_special_tokens=False) for start, stop in runs]


def rendered_ids(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[int]:
    ids = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, return_dict=False)
    return list(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, rng = FAMILIES[name], random.Random(f"tokens {name}")
    ours, theirs = encoder(tmp_path, family), reference(family)
    for _ in range(25):
        tools = TOOLS if family.tools and rng.random() < 0.5 else None
        conversation = read_conversation({"messages": some_conversation(rng, family), "tools": tools})
        expected = rendered_ids(theirs, conversation)
        if name == "glm4":  # ends answers by the header of the next turn only
            expected.append(theirs.eos_token_id)
        assert ours.encode(conversation).tokens.tolist() == expected


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.generation])
def test_masks_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """And the end of the turn, where the template has it outside of its tag."""
    family, rng = FAMILIES[name], random.Random(f"masks {name}")
    ours, theirs = encoder(tmp_path, family), reference(family)
    end = theirs.convert_tokens_to_ids(family.end)
    for _ in range(25):
        messages = some_conversation(rng, family)
        for message in messages:
            message["content"] += "."  # of a last character of several tokens, transformers' mask has only the first
        conversation = read_conversation({"messages": messages})
        outputs = theirs.apply_chat_template(conversation.messages, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.array(outputs["assistant_masks"], np.bool_)
        if name == "generation-without-end":
            mask[1:] |= mask[:-1] & (np.array(outputs["input_ids"][1:]) == end)
        assert np.array_equal(ours.encode(conversation).trained, mask)


def answer(family: Family, content: str, is_last: bool) -> str:
    """What a model of the family writes for an answer of plain words."""
    before = family.before if is_last or family.generation else ""
    return before + content


@pytest.mark.parametrize("name", FAMILIES)
def test_trained_text_is_the_answers_and_their_ends(name: str, tmp_path: Path) -> None:
    """Nothing of the prompt, nothing shifted, and the end of each turn."""
    family = FAMILIES[name]
    ours, theirs = encoder(tmp_path, family), reference(family)
    answers = ["I am fine.", "<b>no", "the answer is: yes"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Hello user"}] if family.system else []
    for number, text in enumerate(answers):
        messages += [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": text}]
    encoded = ours.encode(Conversation(messages, None, (None,) * len(messages)))
    ends = [family.end] * 3
    if name == "glm4":
        ends[-1] = "<|endoftext|>"
    expected = [answer(family, text, text is answers[-1]) + end for text, end in zip(answers, ends, strict=True)]
    assert [run.strip() for run in trained_runs(encoded, theirs)] == expected
    assert encoded.end_ids == set(theirs.convert_tokens_to_ids([end.strip() for end in ends]))


def test_planted_errors_of_the_mask_are_caught(tmp_path: Path) -> None:
    family = FAMILIES["chatml"]
    ours, theirs = encoder(tmp_path, family), reference(family)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am fine."}]
    good = ours.encode(Conversation(messages, None, (None, None)))
    expected = ["I am fine.<|im_end|>"]
    assert trained_runs(good, theirs) == expected
    end = np.flatnonzero(good.trained)[-1]
    without_end = good.trained.copy()
    without_end[end] = False
    for wrong in (np.roll(good.trained, 1), np.roll(good.trained, -1), np.ones_like(good.trained), without_end):
        assert trained_runs(good._replace(trained=wrong), theirs) != expected


def test_what_templates_remove_is_not_trained(tmp_path: Path) -> None:
    """Qwen3 and DeepSeek R1 leave out what was thought before the last question."""
    family = FAMILIES["qwen3"]
    ours, theirs = encoder(tmp_path, family), reference(family)
    thought = "<think>\nold\n</think>\n\n"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"{thought}first"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "second", "reasoning_content": "new"},
    ]
    runs = trained_runs(ours.encode(read_conversation({"messages": messages})), theirs)
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    assert runs == ["first<|im_end|>", call, "<think>\nnew\n</think>\n\nsecond<|im_end|>"]


ROLES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "I am"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "fine"},
]


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        (("assistant",), ["I am<|im_end|>", "fine<|im_end|>"]),
        (("completion",), ["fine<|im_end|>"]),
        (("user", "system"), ["S<|im_end|>", "one<|im_end|>", "two<|im_end|>"]),
    ],
)
def test_roles_that_are_trained(train_on: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    ours, theirs = encoder(tmp_path, FAMILIES["chatml"], train_on), reference(FAMILIES["chatml"])
    assert trained_runs(ours.encode(read_conversation({"messages": ROLES})), theirs) == expected


def test_everything_is_every_token(tmp_path: Path) -> None:
    ours = encoder(tmp_path, FAMILIES["chatml"], ("everything",))
    assert ours.encode(read_conversation({"messages": ROLES})).trained.all()


@pytest.mark.parametrize("no", [{"train": False}, {"weight": 0}])
def test_turns_that_are_not_trained(no: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = encoder(tmp_path, FAMILIES["chatml"]), reference(FAMILIES["chatml"])
    messages = [*ROLES[:2], {**ROLES[2], **no}, {**ROLES[3], "train": True}, ROLES[4]]
    encoded = ours.encode(read_conversation({"messages": messages}))
    assert trained_runs(encoded, theirs) == ["two<|im_end|>", "fine<|im_end|>"]
    assert encoded.tokens.tolist() == theirs.apply_chat_template(ROLES, return_dict=False)


@pytest.mark.parametrize(("sentencepiece", "bos"), [(True, "<s>"), (False, "<s>"), (False, "")])
def test_text_without_a_template_begins_once_and_ends(sentencepiece: bool, bos: str, tmp_path: Path) -> None:
    family = Family("", (bos, "</s>"), "</s>", sentencepiece=sentencepiece)
    ours, theirs = encoder(tmp_path, family), reference(family)
    for prompt in ("What is 12?", f"{bos}What is 12?"):
        encoded = ours.encode(read_conversation({"input": prompt, "output": " yes, no"}))
        ids = theirs("What is 12? yes, no")["input_ids"]
        if not sentencepiece or prompt[0] == "W":  # after a token in the text, Prepend writes a space of its own
            assert encoded.tokens.tolist() == [*ids, theirs.eos_token_id]
        assert encoded.tokens.tolist().count(theirs.convert_tokens_to_ids("<s>") if bos else -1) == bool(bos)
        assert [run.strip() for run in trained_runs(encoded, theirs)] == ["yes, no</s>"]
