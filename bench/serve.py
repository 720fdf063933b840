"""Many clients at once against `trainyard serve`: requests, tokens/s, lost and mixed streams.

    python bench/serve.py [CKPT] [--clients 64] [--seconds 60] [--out bench/results/serve-cpu.json]

Every client streams completions through OpenAI's Python client, one after the other, with different prompts, lengths
and seeds. A stream that ends early is lost; one with another text than its request gets alone is mixed. Without CKPT
the scheduler is the one of the tests, whose tokens follow from prompt and seed: this measures the server itself. With
CKPT, a second, sequential pass asks for some of the texts again.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil

from tests.inference.serve.fake_scheduler import fake_text

ROOT = Path(__file__).parents[1]
MAX_TOKENS = 64
CHECKED = 32
"""Requests to a real model that are repeated alone."""


@dataclass(frozen=True)
class Job:
    prompt: str
    length: int
    seed: int


@dataclass
class Totals:
    requests: int = 0
    tokens: int = 0
    lost: int = 0
    mixed: int = 0
    first_token_s: list[float] = field(default_factory=list)
    texts: dict[Job, str] = field(default_factory=dict)


async def stream(client: openai.AsyncOpenAI, model: str, job: Job) -> tuple[str, float, bool]:
    """Text, seconds to its first part, and whether the stream was complete."""
    start = time.perf_counter()
    parts, first, complete = [], 0.0, False
    chunks = await client.completions.create(
        model=model, prompt=job.prompt, max_tokens=job.length, seed=job.seed, stream=True
    )
    async for chunk in chunks:
        first = first or time.perf_counter() - start
        parts.append(chunk.choices[0].text)
        complete = complete or chunk.choices[0].finish_reason is not None
    return "".join(parts), first, complete


async def run_client(
    number: int, deadline: float, ask: Callable[[Job], Awaitable[tuple[str, float, bool]]], totals: Totals
) -> None:
    draw = random.Random(number)
    while time.perf_counter() < deadline:
        job = Job(f"client {number} asks {draw.random()}", draw.randint(4, MAX_TOKENS), draw.getrandbits(60))
        totals.requests += 1
        try:
            text, first, complete = await ask(job)
        except openai.OpenAIError as error:
            print(f"lost: {error}", file=sys.stderr)
            totals.lost += 1
            continue
        totals.lost += not complete
        totals.tokens += len(text)
        totals.first_token_s.append(first)
        totals.texts[job] = text


async def measure(url: str, model: str, clients: int, seconds: float, is_fake: bool) -> tuple[Totals, float]:
    totals = Totals()
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        start = time.perf_counter()
        ask = lambda job: stream(client, model, job)  # noqa: E731
        await asyncio.gather(*(run_client(number, start + seconds, ask, totals) for number in range(clients)))
        elapsed = time.perf_counter() - start
        if is_fake:
            expected = {job: fake_text(job.prompt, job.length, job.seed) for job in totals.texts}
        else:
            chosen = random.Random(0).sample(list(totals.texts), min(CHECKED, len(totals.texts)))
            expected = {job: (await ask(job))[0] for job in chosen}
    totals.mixed = sum(totals.texts[job] != text for job, text in expected.items())
    return totals, elapsed


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    module = "trainyard" if arguments.checkpoint else "tests.inference.serve.fake_command"
    command = [sys.executable, "-m", module, "serve", arguments.checkpoint or "fake", "--port", "0"]
    command += ["--model-name", "bench", "--device", arguments.device]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        ready = re.search(r"at (http\S+)", server.stdout.readline())
        if not ready:
            raise SystemExit("the server did not start")
        cpu_before = cpu_seconds(server.pid)
        totals, elapsed = asyncio.run(
            measure(ready[1], "bench", arguments.clients, arguments.seconds, not arguments.checkpoint)
        )
        cpu = cpu_seconds(server.pid) - cpu_before
    finally:
        server.terminate()
        code = server.wait(30)
    result = {
        "requests": totals.requests,
        "tokens": totals.tokens,
        "lost": totals.lost,
        "mixed": totals.mixed,
        "clients": arguments.clients,
        "seconds": round(elapsed, 1),
        "tokens_per_s": round(totals.tokens / elapsed),
        "median_first_token_ms": round(1000 * statistics.median(totals.first_token_s), 1),
        "server_cpu_us_per_token": round(1e6 * cpu / max(totals.tokens, 1)),
        "exit_code": code,
    }
    print("  ".join(f"{key} {value}" for key, value in result.items()))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(totals.lost or totals.mixed or code))


if __name__ == "__main__":
    main()
