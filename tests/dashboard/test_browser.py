"""The page in a real Chromium: live curves, comparison, a phone, the keyboard, accessibility."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.conftest import WAIT_S, OpenTab, RunningDashboard, StartPage, running_page
from tests.dashboard.run_writer import loss_spike, marked, rollout, training_record, write_lines, write_run, write_spans
from tests.support.forkserver import ForkServer

SMALL_RUN = [
    *("model.hidden=16", "model.heads=2", "model.kv_heads=1", "model.layers=1", "model.ffn=32", "data.seq_len=32"),
    *("train.global_batch=4", "train.micro_batch=4", "train.steps=100000", "log.every=1", "log.loggers=[]"),
    *("checkpoint.every=0", "checkpoint.export_hf=false", "evaluate.every=20", "device.name=cpu"),
]
STEP_SHOWN = "() => Number(/step ([0-9,]+)/.exec(document.querySelector('ul.runs').innerText)[1].replace(',', ''))"
TABS = ["Events", "Step times", "Plan", "Config", "Checkpoints", "Data", "Rollouts", "Texts", "Log"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all kinds."""
    root = tmp_path_factory.mktemp("browser") / "runs"
    base = write_run(root, "base", events=[loss_spike(120, [7, 11, 13])])
    for rank in range(4):
        write_spans(base, rank, dict.fromkeys(range(1, 201), (20 if rank == 3 else 10) * 1000000))
    (base / "samples.jsonl").write_text('{"step": 5, "prompt": "Once", "text": " <img src=x onerror=alert(1)>"}\n')
    parts = [["<i>Hi</i>\n", False], ["Hello<|im_end|>", True]]
    sample = {"sample": 7, "source": "chats.jsonl:3", "tokens": 4000, "trained": 1000, "shown": 2048, "parts": parts}
    write_lines(base / "inputs.jsonl", [sample])
    (base / "logs").mkdir()
    (base / "logs" / "7.log").write_text("step 1\nstep 2\n")
    (base / "checkpoints" / "step_00000100").mkdir(parents=True)
    tuned = write_run(root, "tuned", lr=0.006, steps=150, outcome=None, started=1.79e9)
    answers = {"chosen": marked(("<b>4</b>", True), ("\n", False)), "rejected": marked(("5", True), ("\n", False))}
    place = {"sample": 7, "source": "pairs.jsonl:3", "pair": 2, "pairs": 3}
    write_lines(tuned / "inputs.jsonl", [{**place, "prompt": marked(("<i>2+2?</i>\n", False)), **answers}])
    two = {"rewards": {"right": 0.5, "<u>short": 1.0}, "finished": False, "tokens": 1}
    texts = [rollout(1, "old", 0.0), rollout(9, "worse", 0.25), rollout(9, "<s>best</s>", 0.75, **two)]
    write_lines(tuned / "rollouts.jsonl", [*texts, {"step": 9}])
    broken = write_run(root, "broken", steps=60, outcome="failed", error="the weights are not finite", started=1.78e9)
    records = [training_record(step, loss="nan" if step > 55 else 2.0) for step in range(1, 61)]
    write_lines(broken / "metrics.jsonl", [*records[:-1], records[-1] | {"not_finite": "loss nan: gradient of a"}])
    for name, names in (("pairs", ["chosen", "rejected", "margin", "accuracy"]), ("reward", ["mean", "<b>right</b>"])):
        changes = [{f"rewards/{key}": step / 60 * place for place, key in enumerate(names, 1)} for step in range(61)]
        more = [{**each, "kl": 0.5, "completions/length": 30.0} if name == "reward" else each for each in changes]
        learning = write_run(root, name, steps=60, started=1.7e9)
        write_lines(learning / "metrics.jsonl", [training_record(step, **more[step]) for step in range(1, 61)])
    (root / "empty").mkdir()
    (root / "empty" / "run.json").write_text("{}")
    write_run(root, "odd <b>name & 'quotes'", steps=5, started=1.0)
    return root


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[RunningDashboard]:
    with running_page(runs) as running:
        yield running


def selected(*names: str, **choices: str) -> str:
    """The part of the address that selects runs."""
    return "#" + "&".join([*(f"runs={name}" for name in names), *(f"{key}={value}" for key, value in choices.items())])


def drawn(tab: Any, chart: int = 0) -> str:
    """The picture of a chart: it changes when a curve changes."""
    return str(
        tab.evaluate("index => document.querySelectorAll('.plot')[index].querySelector('canvas').toDataURL()", chart)
    )


def wait_for_change(tab: Any, before: str) -> None:
    tab.wait_for_function("before => document.querySelector('.plot canvas').toDataURL() !== before", arg=before)


def step_shown(tab: Any) -> int:
    return int(tab.evaluate(STEP_SHOWN))


def choose_axis(tab: Any, title: str) -> None:
    tab.locator(".segments").get_by_text(title, exact=True).click()


def serious_problems(tab: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(tab).response["violations"]
    return [
        f"{problem['id']}: {node['html'][:200]} {node['failureSummary']}"
        for problem in found
        if problem["impact"] in ("serious", "critical")
        for node in problem["nodes"]
    ]


def test_a_run_that_is_going_on_is_followed(
    start_page: StartPage, open_tab: OpenTab, tmp_path: Path, cli: ForkServer
) -> None:
    """The page is open before the run starts, and shows its start, progress and end without a reload."""
    (tmp_path / "runs").mkdir()
    tab = open_tab(start_page(tmp_path / "runs").url).tab
    tab.get_by_text("No runs yet. Start one:").wait_for()
    assert tab.get_by_text("trainyard train", exact=True).is_visible()
    run = cli.start(["train", "tiny-llama", *SMALL_RUN, "log.name=live"], tmp_path)
    try:
        row = tab.locator("ul.runs > li", has_text="live")
        row.get_by_text("running").wait_for()
        tab.wait_for_function("() => /step [1-9]/.test(document.querySelector('ul.runs').innerText)")
        tab.locator(".plot canvas").first.wait_for()
        before, step = drawn(tab), step_shown(tab)
        wait_for_change(tab, before)
        tab.wait_for_function(f"() => ({STEP_SHOWN})() > {step}")
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(WAIT_S)
        for stream in (run.stdout, run.stderr):  # frames of playwright may keep them longer than the fork server lives
            if stream:
                stream.close()
    tab.wait_for_function("() => !document.querySelector('ul.runs').innerText.includes('running')")


def test_runs_are_compared(open_tab: OpenTab, page: RunningDashboard) -> None:
    tab = open_tab(page.url + selected("base", run="base")).tab
    alone = drawn(tab)
    tab.get_by_label("Show the curves of tuned").check()
    tab.wait_for_function("() => document.querySelectorAll('.legend li').length === 2")
    wait_for_change(tab, alone)
    for label in ("Log y", "Log x"):
        before = drawn(tab)
        tab.get_by_label(label).check()
        wait_for_change(tab, before)
    for axis in ("Tokens", "Time"):
        choose_axis(tab, axis)
        assert f"axis={axis.lower()}" in tab.url
    tab.get_by_label("Smoothing").fill("60")
    choose_axis(tab, "Step")
    tab.get_by_role("tab", name="Config").click()
    tab.get_by_label("Compare with").select_option("tuned")
    tab.locator("#panel th", has_text="tuned").wait_for()
    cells = tab.locator("#panel td").all_inner_texts()
    assert cells == ["optimizer.lr", "0.002", "0.006"]
    tab.reload()  # the address holds all choices
    tab.wait_for_selector("html[data-ready]", state="attached")
    assert tab.get_by_label("Log y").is_checked()
    assert tab.get_by_label("Compare with").input_value() == "tuned"


def test_spikes_are_marked_and_the_details_show_everything(open_tab: OpenTab, page: RunningDashboard) -> None:
    tab = open_tab(page.url + selected("base", "broken", run="base")).tab
    plot = tab.locator(".plot").first
    plot.focus()
    for _ in range(60):  # the keys read values; step 120 of 200 has a mark
        tab.keyboard.press("ArrowRight")
        if "loss spike" in tab.locator(".tooltip").first.inner_text():
            break
    text = tab.locator(".tooltip").first.inner_text()
    assert "samples 7, 11, 13" in text
    assert "trainyard data show runs/base --step 120" in text
    contents = {
        "Events": "Samples of the batch: 7, 11, 13",
        "Step times": "Slowest ranks",
        "Config": "optimizer.lr",
        "Checkpoints": "incomplete",
        "Data": "4,000 tokens, 1,000 trained (25.0 %); the first 2,048 are shown",
        "Texts": "Once <img src=x onerror=alert(1)>",
        "Log": "step 2",
    }
    for name, content in contents.items():
        tab.get_by_role("tab", name=name).click()
        tab.locator("#panel").get_by_text(content).first.wait_for()
    tab.get_by_role("tab", name="Data").click()
    tab.locator("#panel mark").wait_for()
    assert tab.locator("#panel mark").all_inner_texts() == ["Hello<|im_end|>"]
    assert tab.locator("#panel blockquote").inner_text() == "<i>Hi</i>\nHello<|im_end|>"
    tab.get_by_role("button", name="broken").first.click()
    tab.get_by_text("the weights are not finite").first.wait_for()
    tab.get_by_role("tab", name="Events").click()
    tab.locator("#panel").get_by_text("loss nan: gradient of a").wait_for()
    tab.get_by_role("button", name="odd <b>name & 'quotes'").first.click()
    assert tab.locator("#details-title").inner_text() == "odd <b>name & 'quotes'"


def test_metrics_of_some_runs_have_charts_by_prefix(open_tab: OpenTab, page: RunningDashboard) -> None:
    common = ["Loss", "Evaluation", "Gradient norm", "Learning rate", "Tokens per second", "MFU"]
    tab = open_tab(page.url + selected("base", run="base")).tab
    titles = tab.locator(".chart h3")
    assert titles.all_inner_texts() == common
    tab.get_by_label("Show the curves of base").uncheck()
    tab.get_by_label("Show the curves of pairs").check()
    tab.locator("h3", has_text="Rewards: accuracy").wait_for()
    assert titles.all_inner_texts() == ["Loss", "Rewards", "Rewards: accuracy", *common[1:]]
    rewards = tab.locator(".chart", has=tab.get_by_role("heading", name="Rewards", exact=True))
    assert rewards.locator(".metric-key span").all_inner_texts() == ["chosen", "rejected", "margin"]
    plot = rewards.locator(".plot")
    plot.focus()
    tab.keyboard.press("End")
    assert [line.split() for line in plot.locator(".tooltip p").all_inner_texts()] == [
        ["step", "60"], ["chosen", "1.00"], ["rejected", "2.00"], ["margin", "3.00"],
    ]  # fmt: skip
    tab.get_by_label("Smoothing").fill("60")
    tab.get_by_label("Show the curves of reward").check()
    tab.locator("h3", has_text="KL divergence").wait_for()
    assert titles.all_inner_texts() == [
        "Loss", "Rewards", "Rewards: accuracy", *common[1:], "KL divergence", "Completions: length",
    ]  # fmt: skip
    assert "<b>right</b>" in rewards.locator(".metric-key span").all_inner_texts()
    plot.focus()
    tab.keyboard.press("End")
    assert "reward <b>right</b>" in plot.locator(".tooltip").inner_text()
    assert serious_problems(tab) == []


def test_the_answers_of_a_pair_are_beside_each_other(open_tab: OpenTab, page: RunningDashboard) -> None:
    address = page.url + selected("tuned", run="tuned", tab="data")
    for width, is_stacked in ((1280, False), (400, True)):
        tab = open_tab(address, width).tab
        tab.locator("#panel").get_by_text("sample 7, pair 2 of 3: pairs.jsonl:3").wait_for()
        assert tab.locator("#panel blockquote").all_inner_texts() == ["<i>2+2?</i>\n", "<b>4</b>\n", "5\n"]
        assert tab.locator("#panel mark").all_inner_texts() == ["<b>4</b>", "5"]
        assert tab.locator("#panel h4").all_inner_texts() == ["Chosen", "Rejected"]
        tab.get_by_text("9 tokens, 8 trained (88.9 %)").wait_for()
        chosen, rejected = (tab.locator(".answers > div").nth(index).bounding_box() for index in (0, 1))
        assert (chosen["y"] < rejected["y"]) == is_stacked
        assert (chosen["x"] < rejected["x"]) != is_stacked


def test_rollouts_are_sorted_by_step_and_reward(open_tab: OpenTab, page: RunningDashboard) -> None:
    tab = open_tab(page.url + selected("tuned", run="tuned", tab="rollouts")).tab
    tab.locator("#panel").get_by_text("step 9, group 0: 2 completions").wait_for()
    assert tab.locator("#panel blockquote").all_inner_texts() == [
        *("prompt 9", "<s>best</s>", "worse"),
        *("prompt 1", "old"),
    ]
    rewards = tab.locator("#panel .completions .line").all_inner_texts()
    assert rewards[0] == "reward 0.750 · right 0.500 · <u>short 1.00 · advantage 0.250 · 1 token, cut off"
    assert rewards[1:] == ["reward 0.250 · advantage -0.250 · 34 tokens", "reward 0 · advantage -0.500 · 34 tokens"]
    tab.get_by_role("button", name="base").first.click()
    tab.get_by_text("trainyard train my.yaml train.objective=grpo").wait_for()


def test_numbers_are_short_and_right(open_tab: OpenTab, page: RunningDashboard) -> None:
    tab = open_tab(page.url).tab
    found = tab.evaluate(
        """async () => { const { compact, duration, exact, significant, tick } = await import("/static/format.js");
        return [[0, 0.002, 1e-4, 1.5, 20, 999.9, 2000, 20000, 150000, 1.5e6, -30000].map(tick),
            [0.5, 1234, 999999, 3.5e9, null].map(compact), [0.00012, 1.23456, 0, 1e12, 3].map((n) => significant(n, 3)),
            [5, 90, 7300, 3e5].map(duration), [1000, 0.25].map(exact)]; }"""
    )
    assert found == [
        ["0", "0.002", "1e-4", "1.5", "20", "1,000", "2,000", "20k", "150k", "1.5M", "-30k"],
        ["0.500", "1.23k", "1.00M", "3.50G", "–"],
        ["1.20e-4", "1.23", "0", "1.00e12", "3.00"],
        ["5 s", "2 min", "2 h", "3 d"],
        ["1,000", "0.25"],
    ]


def test_a_phone_can_use_it(open_tab: OpenTab, page: RunningDashboard) -> None:
    tab = open_tab(page.url + selected("base", "tuned", run="base"), 400, 800, has_touch=True, is_mobile=True).tab
    for name in TABS:
        tab.get_by_role("tab", name=name).click()
        tab.wait_for_timeout(50)
        assert tab.evaluate("document.documentElement.scrollWidth") == 400, name
    for box in tab.locator(".plot, ul.runs, .tabs, #theme").all():
        bounds = box.bounding_box()
        assert bounds is None or (bounds["x"] >= 0 and bounds["x"] + bounds["width"] <= 400)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_no_serious_accessibility_problem(open_tab: OpenTab, page: RunningDashboard, scheme: str) -> None:
    tab = open_tab(page.url + selected("base", "broken", run="base", tab="times"), color_scheme=scheme).tab
    tab.get_by_text("Slowest ranks").first.wait_for()
    assert serious_problems(tab) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", TABS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_no_serious_accessibility_problem_anywhere(
    open_tab: OpenTab, page: RunningDashboard, name: str, scheme: str, width: int
) -> None:
    tab = open_tab(page.url + selected("base", "broken", run="base", other="tuned"), width, color_scheme=scheme).tab
    tab.get_by_role("tab", name=name).click()
    tab.wait_for_timeout(300)
    assert serious_problems(tab) == []


def test_the_keyboard_is_enough(open_tab: OpenTab, page: RunningDashboard) -> None:
    tab = open_tab(page.url + selected("base", run="base")).tab

    def tab_until(script: str) -> None:
        for _ in range(80):
            tab.keyboard.press("Tab")
            if tab.evaluate(f"(active => {script})(document.activeElement)"):
                return
        raise AssertionError(f"the focus never reaches {script}")

    tab_until("active.className === 'skip'")
    tab_until("active.type === 'search'")
    tab.keyboard.type("tun")
    assert tab.locator("ul.runs > li").count() == 1
    tab_until("active.type === 'checkbox' && active.getAttribute('aria-label').includes('tuned')")
    tab.keyboard.press("Space")
    assert tab.locator(".legend li").count() == 2
    tab_until("active.type === 'radio'")
    tab.keyboard.press("ArrowRight")
    assert "axis=tokens" in tab.url
    tab_until("active.className === 'plot'")
    tab.keyboard.press("ArrowRight")
    assert "base" in tab.locator("#announcement").inner_text()
    tab.keyboard.press("+")
    tab.get_by_role("button", name="Show everything").wait_for()
    tab.keyboard.press("0")
    tab.get_by_role("button", name="Show everything").wait_for(state="hidden")
    tab_until("active.getAttribute('role') === 'tab'")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.textContent") == "Step times"
    tab_until("active.tagName === 'CANVAS'")
    tab.keyboard.press("ArrowRight")
    assert "rank 0, step 1" in tab.locator(".heat-map .note").inner_text()


@pytest.mark.nightly
def test_zooming_asks_for_more_points(start_page: StartPage, open_tab: OpenTab, tmp_path: Path) -> None:
    write_run(tmp_path, "long", steps=6000, total=6000)
    page = start_page(tmp_path)
    tab = open_tab(page.url + selected("long")).tab
    box = tab.locator(".plot").first.bounding_box()
    assert box
    with tab.expect_response(lambda answer: "from=" in answer.url) as caught:
        tab.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 80)
        tab.mouse.down()
        tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 80, steps=4)
        tab.mouse.up()
    steps = caught.value.json()["columns"]["step"]
    assert 1500 < steps[0] < steps[-1] < 3500
    assert len(steps) == steps[-1] - steps[0] + 1  # every step
    tab.get_by_role("button", name="Show everything").click()


@pytest.mark.nightly
def test_light_and_dark(open_tab: OpenTab, page: RunningDashboard) -> None:
    tab = open_tab(page.url + selected("base"), color_scheme="dark").tab
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(background)
    button = tab.get_by_role("button", name="Theme")
    button.click()
    assert button.inner_text() == "Theme: light"
    light = tab.evaluate(background)
    assert light != dark
    tab.reload()
    assert tab.evaluate(background) == light
    button.click()
    assert tab.evaluate(background) == dark


@pytest.mark.nightly
def test_unknown_runs_and_a_lost_server_are_said(open_tab: OpenTab, tmp_path: Path) -> None:
    write_run(tmp_path, "run")
    with running_page(tmp_path) as page:
        shown = open_tab(page.url + selected("gone", "run", run="gone"))
        shown.tab.get_by_text("There is no run gone.").wait_for()
        shown.tab.get_by_text("Choose a run from the list.").wait_for()
        shutil.rmtree(tmp_path / "run")
        shown.tab.get_by_text("No runs yet. Start one:").wait_for()
    shown.tab.get_by_text("The server does not answer; trying again").wait_for()
    assert all("ERR_CONNECTION_REFUSED" in line or "404" in line for line in shown.problems)
    shown.problems.clear()


@pytest.mark.nightly
def test_the_token_is_asked_for(start_page: StartPage, open_tab: OpenTab, tmp_path: Path) -> None:
    write_run(tmp_path, "run")
    page = start_page(tmp_path, token="s3cret")
    shown = open_tab(page.url, wait=False)
    assert serious_problems(shown.tab) == []
    shown.tab.get_by_label("Token").fill("wrong")
    shown.tab.keyboard.press("Enter")
    shown.tab.get_by_text("That is not the token.").wait_for()
    shown.tab.get_by_label("Token").fill("s3cret")
    shown.tab.get_by_role("button", name="Sign in").click()
    shown.tab.wait_for_selector("html[data-ready]", state="attached")
    shown.problems[:] = [line for line in shown.problems if "401" not in line]
    assert "s3cret" not in shown.tab.url
    assert open_tab(f"{page.url}/?token=s3cret").tab.url.partition("#")[0] == f"{page.url}/"
