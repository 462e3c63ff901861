"""specrun bench: the table, the JSON, the plot, and that a drafter that changes tokens is caught."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

import specrun
from specrun.bench import ALL, Bench, rows
from specrun.bench_report import bench_table, bench_to_json, mismatch_lines
from specrun.cli import main
from specrun.prompts import BUILTIN, Task, load_tasks
from specrun.rules import TypicalAcceptance
from specrun.sampling import SamplingParams
from specrun.sequence import Statistics

TASKS = [Task("a", "copy", ("one two three one two three one",), chat=False), Task("b", "qa", ("who", "when"))]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    return specrun.load(tiny_bundle)


@pytest.fixture(scope="module")
def measured(engine):
    bench = Bench(engine, ["prompt-lookup"], PARAMS, rounds=2)
    return bench, bench.run(TASKS)


def test_every_contender_gets_the_same_prompts(engine, measured):
    _, requests = measured
    assert [(r.task.name, r.turn) for r in requests] == [("a", 0), ("b", 0), ("b", 1)]
    assert all(list(r.runs) == ["none", "prompt-lookup"] and len(r.runs["none"]) == 2 for r in requests)
    second = engine.text.chat(
        [
            {"role": "user", "content": "who"},
            {"role": "assistant", "content": requests[1].runs["none"][0].text},
            {"role": "user", "content": "when"},
        ]
    )
    assert requests[2].prompt == engine.text.encode(second, special=False)


def test_rows_add_up(measured):
    bench, requests = measured
    table = {(row.group, row.drafter): row for row in rows(bench, requests)}
    assert list(table) == [(g, d) for g in ("copy", "qa", ALL) for d in ("none", "prompt-lookup")]
    for row in table.values():
        assert row.requests == row.identical and row.lossless
        assert row.tokens == row.requests * 12 == row.accepted + row.passes + row.requests
        assert row.tokens_per_second == pytest.approx(1 / row.token_seconds)
    plain, drafted = table[ALL, "none"], table[ALL, "prompt-lookup"]
    assert plain.ratio == 1 and plain.tokens_per_pass == 1
    assert drafted.ratio == pytest.approx(plain.token_seconds / drafted.token_seconds)


def test_medians_of_rounds(engine):
    """Times come from the median round, so that one slow round does not count."""
    bench = Bench(engine, ["prompt-lookup"], PARAMS, rounds=3)
    (request,) = bench.run(TASKS[:1])
    for drafter, times in (("none", (1.1, 110.0, 1.1)), ("prompt-lookup", (55.0, 0.55, 0.55))):
        for run, seconds in zip(request.runs[drafter], times, strict=True):
            run.stats.decode_seconds = seconds
    plain, drafted = rows(bench, [request])
    assert plain.tokens_per_second == pytest.approx(10) and drafted.ratio == pytest.approx(2)


def test_depths_are_summed_over_requests():
    """Rates of all requests together, not averages of rates."""
    first = Statistics(emitted=10, passes=5, drafted=8, accepted=4, offered=[4, 4], taken=[4, 0])
    second = Statistics(emitted=3, passes=1, drafted=1, accepted=1, offered=[4], taken=[0])
    from specrun.bench import _total

    assert _total([first, second]).acceptance_by_depth == [0.5, 0.0]


def test_changed_tokens_are_found(engine, measured):
    """A drafter whose output differs is reported with the place, both tokens, and the target's top-2 gap there."""
    _, requests = measured
    answer = requests[0].runs["none"][0].token_ids

    class Liar(Bench):
        def _measure(self, request, done):
            super()._measure(request, done)
            request.runs["prompt-lookup"][0].token_ids[5] += 1
            request.mismatches["prompt-lookup"] = self._mismatch(request, "prompt-lookup")

    (request,) = Liar(engine, ["prompt-lookup"], PARAMS, rounds=1).run(TASKS[:1])
    found = request.mismatches["prompt-lookup"]
    logprobs = engine.generate(request.prompt, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)).logprobs
    assert (found.index, found.plain, found.drafted) == (5, answer[5], answer[5] + 1)
    assert found.gap == pytest.approx(logprobs[5].top[0][1] - logprobs[5].top[1][1])
    assert "token 5" in mismatch_lines([request])[0] and "top-2 gap" in mismatch_lines([request])[0]


def test_lossy_is_said_wherever_speed_is(engine):
    params = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
    bench = Bench(engine, ["prompt-lookup"], params, rounds=1, rule=TypicalAcceptance())
    requests = bench.run(TASKS[:1])
    table = bench_table(rows(bench, requests))
    assert "LOSSY" in str(table.caption) and all("(lossy)" in cell for cell in table.columns[1].cells)
    assert not any(row["lossless"] for row in bench_to_json(bench, requests, rows(bench, requests))["rows"])


def test_command(tiny_bundle, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = ({"question_id": 81, "category": "writing", "turns": ["x"]}, {"id": "y", "group": "rag", "turns": ["z"]})
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    options = ("--prompts", file, "--rounds", 1, "--max-tokens", 4, "--json", report, "--plot", picture)
    result = invoke(tiny_bundle, *options, "--drafter", "prompt-lookup")
    assert result.exit_code == 0, result.output
    assert "mt-bench" in result.stdout and "rag" in result.stdout and "prompt-lookup" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    data = json.loads(report.read_text())
    assert [row["group"] for row in data["rows"]] == ["mt-bench"] * 2 + ["rag"] * 2 + [ALL] * 2
    assert data["requests"][0]["runs"]["none"][0]["stats"]["emitted"] <= 4
    only = invoke(
        tiny_bundle, "--prompts", file, "--group", "rag", "--rounds", 1, "--max-tokens", 2, "--drafter", "none"
    )
    assert "mt-bench" not in only.stdout and "prompt-lookup" not in only.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "found no prompts"),
        ("{", "line 1: not a prompt"),
        ("[1]", "line 1: not a prompt"),
        ('{"id": 1, "group": "x"}', "no 'turns'"),
        ('{"id": 1, "group": "x", "turns": []}', "turns must be"),
        ('{"id": 1, "turns": ["x"]}', "no 'category'"),
    ],
)
def test_refused_prompts(tiny_bundle, tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    refused(invoke(tiny_bundle, "--prompts", file), message)


def test_refusals(tiny_bundle, tmp_path):
    refused(invoke(tiny_bundle, "--prompts", tmp_path / "absent"), "prompts cannot be read")
    refused(invoke(tiny_bundle, "--group", "nothing"), "the prompts have")
    refused(invoke(tiny_bundle, "--drafter", "magic"), "Drafter 'magic'")
    refused(invoke(tiny_bundle, "--max-tokens", 0), "max_tokens: found 0")
    refused(invoke(tiny_bundle, "--json", tmp_path / "absent" / "x.json"), "its directory does not exist")


def test_plot_without_matplotlib_is_refused_before_measuring(tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    refused(invoke(tiny_bundle, "--plot", tmp_path / "x.png"), "specbuild[plot]")


def refused(result: Result, message: str) -> None:
    assert message in result.stderr
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr


def test_builtin_prompts():
    """Six groups as in Spec-Bench, one prompt that copies and one that cannot; the limit is by group."""
    groups = {task.group for task in load_tasks(BUILTIN)}
    assert groups == {"mt-bench", "translation", "summarization", "qa", "math_reasoning", "rag", "copy", "no-copy"}
    limited = load_tasks(BUILTIN, limit=1)
    assert len(limited) == len(groups) and {task.group for task in limited} == groups
    copy = next(task for task in limited if task.group == "copy")
    assert not copy.chat and copy.turns[0].count("def count_words(text):") == 2
