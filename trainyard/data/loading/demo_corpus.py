"""Generated stories and conversations for a first run without a download: simple grammar, correct arithmetic and
recurring names, enough structure for a small model to learn visibly."""

import json
import random

NAMES = ["Ada", "Grace", "Alan", "Edsger", "Barbara", "Claude", "Emmy", "Kurt", "Sofia", "Leonhard", "Mary", "Noor"]
PLACES = ["the yard", "the harbour", "the old station", "the library", "the workshop", "the bridge", "the market"]
THINGS = ["engine", "lantern", "map", "notebook", "bell", "compass", "kettle", "wagon", "ladder", "clock"]
COLORS = ["red", "green", "blue", "grey", "yellow", "black", "white"]
TIMES = ["In the morning", "At noon", "Before dusk", "After the rain", "Late at night", "On the third day"]
VERBS = ["found", "mended", "carried", "painted", "counted", "hid", "measured", "borrowed", "cleaned"]
FEELINGS = ["glad", "tired", "curious", "quiet", "proud", "careful", "hungry"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def make_story(seed: int) -> str:
    """One story of about a dozen sentences, a function of the seed."""
    rng = random.Random(seed)
    hero, friend = rng.sample(NAMES, 2)
    place, thing, color = rng.choice(PLACES), rng.choice(THINGS), rng.choice(COLORS)
    lines = [f"{hero} and {friend} worked at {place}.", f"There was a {color} {thing} in {place}."]
    for _ in range(rng.randint(6, 12)):
        who, other = rng.sample([hero, friend], 2)
        kind = rng.randrange(5)
        if kind == 0:
            lines.append(f"{rng.choice(TIMES)} {who} {rng.choice(VERBS)} the {color} {thing}.")
        elif kind == 1:
            lines.append(f'"Where is the {thing}?" asked {who}. "It is at {place}," said {other}.')
        elif kind == 2:
            a, b = rng.randint(0, 5), rng.randint(0, 5)
            lines.append(f"{who} had {NUMBERS[a]} {thing}s and {other} had {NUMBERS[b]}; together {NUMBERS[a + b]}.")
        elif kind == 3:
            lines.append(f"{who} was {rng.choice(FEELINGS)}, and so was {other}.")
        else:
            place = rng.choice(PLACES)
            lines.append(f"Then they walked to {place} with the {thing}.")
    lines.append(f"That evening {hero} and {friend} went home.")
    return " ".join(lines) + "\n"


def make_stories(count: int) -> list[str]:
    return [make_story(seed) for seed in range(count)]


def make_conversation(seed: int) -> list[dict[str, str]]:
    """Messages of one or two questions with answers, a function of the seed."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.25 else []
    for _ in range(rng.randint(1, 2)):
        kind, thing, color = rng.randrange(3), rng.choice(THINGS), rng.choice(COLORS)
        if kind == 0:
            a, b = rng.randint(0, 5), rng.randint(0, 5)
            question, answer = f"What is {NUMBERS[a]} plus {NUMBERS[b]}?", f"{NUMBERS[a + b].capitalize()}."
        elif kind == 1:
            question, answer = f"What color is the {color} {thing}?", f"The {thing} is {color}."
        else:
            question, answer = f"How do you spell {thing}?", "-".join(thing.upper())
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def conversation_lines(count: int, pairs: bool = False) -> bytes:
    """Conversations as JSON lines; `pairs`: with the answer to another question as the rejected one."""
    records = []
    for seed in range(count):
        *prompt, answer = make_conversation(seed)
        if pairs:
            records.append({"prompt": prompt, "chosen": [answer], "rejected": [_other_answer(answer, seed)]})
        else:
            records.append({"messages": [*prompt, answer]})
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def prompt_lines() -> bytes:
    """All numbers of three digits, in an order of their own, to be written with their digits sorted."""
    numbers = random.Random(0).sample(range(1000), 1000)
    records = ({"prompt": f"{number:03}>", "answer": "".join(sorted(f"{number:03}"))} for number in numbers)
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _other_answer(answer: dict[str, str], seed: int) -> dict[str, str]:
    return next(other for n in range(1, 100) if (other := make_conversation(seed + n * 1000)[-1]) != answer)
