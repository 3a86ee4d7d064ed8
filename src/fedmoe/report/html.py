"""One page that shows a comparison: it opens without a network and holds nothing but text and our own figures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedmoe.evaluation.figure_of_merit import FigureOfMerit, figure_of
from fedmoe.evaluation.metric_catalog import title_of
from fedmoe.evaluation.summary import RunRecord, summarise
from fedmoe.report import curves, expert_figures, figures
from fedmoe.report.markdown import class_blocks, figure_text, metric_text
from fedmoe.report.methods import Method, Row, client_names, group, rejected_updates
from fedmoe.report.notes import notes
from fedmoe.report.svg import colour_rules, element, escape

STYLE = (
    colour_rules(":root")
    + """
:root{color-scheme:light dark}*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.25rem 4rem;max-width:76rem;background:var(--paper);color:var(--ink);
font:1rem/1.55 system-ui,sans-serif}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 .25rem}h2{font-size:1.15rem;margin:2.25rem 0 .5rem}
h1,p,dd,td,th{overflow-wrap:anywhere}p{max-width:46rem;margin:.25rem 0}
.soft,.note,small,figcaption,dt{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:1rem 0}dd{margin:0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.note{margin-top:.5rem;font-size:.9rem}
th,td{padding:.4rem .9rem .4rem 0;text-align:right;border-bottom:1px solid var(--grid);vertical-align:top}
td,thead th{white-space:nowrap}th:first-child{text-align:left;min-width:9rem}tbody th{font-weight:600}
small{display:block;font-size:.8rem}.figures{display:grid;gap:1.5rem 2.5rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr))}figure{margin:0;min-width:0}
figure svg{display:block;width:100%;min-width:28rem;height:auto}figcaption{font-size:.9rem;margin-top:.25rem}
h3{font-size:1rem;margin:0 0 .5rem}code,pre{font:.85rem/1.5 ui-monospace,monospace}
pre{background:var(--panel);padding:.75rem 1rem;overflow-x:auto;margin:.5rem 0}summary{cursor:pointer}
"""
)
NO_NETWORK = element(
    "meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"
)


def render(results: Sequence[RunRecord], title: str, table: Sequence[Row] | None = None) -> str:
    """The whole page.

    Args:
        results: runs as stored in `results.json`; runs of one method with several seeds are shown as one method.
        table: a row per method as `summarise(results)` makes them, which is what we take if there is none.
    """
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        NO_NETWORK,
        element("title", escape(title)),
        element("style", STYLE),
    ]
    body = [
        element("header", element("h1", escape(title)), _facts(results)),
        _summary(summarise(results) if table is None else table, figure_of(results), notes(results)),
        *_by_class(results),
        _figures(results),
        _learning(results),
        _experts(group(results)),
        _traffic(group(results)),
        _config(results),
    ]
    page = element("html", element("head", *head), element("body", element("main", *body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def scores_section(results: Sequence[RunRecord]) -> str:
    """The tables alone, for a notebook."""
    return element("div", _summary(summarise(results), figure_of(results), notes(results)), *_by_class(results))


def _facts(results: Sequence[RunRecord]) -> str:
    clients = {score["client"] for r in results for score in r["scores"] if not score["unseen"]}
    unseen = {s["client"] for r in results for s in r["scores"] if s["unseen"] and s["data"] == "own"}
    facts = {
        "Methods": _distinct(method.title for method in group(results)),
        "Seeds": _distinct(r["seed"] for r in results),
        "Clients": (f"{len(clients)}" if clients else "none was asked for scores")
        + (f", and {len(unseen)} unseen in training" if unseen else ""),
        "Rounds": _distinct(r["rounds"] for r in results if r["rounds"]) or "none",
        "Weights of a model": _distinct(f"{r['model_weights']:,}" for r in results if "model_weights" in r),
        "Split": _distinct(r.get("split_digest", "") for r in results),
        "Command": element("code", _distinct((r.get("command", "") for r in results), "; ")),
    }
    return element("dl", *(element("dt", name) + element("dd", value) for name, value in facts.items()))


def _distinct(values: Iterable[object], between: str = ", ") -> str:
    return escape(between.join(dict.fromkeys(str(value) for value in values)))


def _summary(table: Sequence[Row], figure: FigureOfMerit, footnotes: Sequence[str]) -> str:
    if not table:
        return ""
    kinds = {
        "own": "Own data",
        "global": "Global test",
        "unseen": "Unseen clients",
        "pooled": "New client, pooled data",
    }
    kinds = {kind: name for kind, name in kinds.items() if any(row.get(kind) for row in table)}
    metrics = list({name: None for row in table for name in row.get("metrics") or {}})
    names = ["Method", *kinds.values(), "Spread", "Worst decile", *(escape(title_of(name)) for name in metrics)]
    best = {kind: figure.best([row[kind]["mean"] for row in table if row.get(kind)]) for kind in kinds}
    rows = [
        element("th", escape(row["title"]), scope="row")
        + "".join(_score(row.get(kind), best[kind], len(table), figure) for kind in kinds)
        + "".join(element("td", figure_text(row.get("own"), key, figure)) for key in ("spread", "worst_decile"))
        + "".join(element("td", metric_text((row.get("metrics") or {}).get(name))) for name in metrics)
        for row in table
    ]
    more = "".join(element("p", escape(words), class_="note") for words in footnotes)
    title = f"{figure.name}, in percent" if figure.percent else figure.name
    return element("section", element("h2", title), _table(names, rows, _how_to_read(table, figure)), more)


def _by_class(results: Sequence[RunRecord]) -> list[str]:
    sections = []
    for title, classes, rows in class_blocks(results, summarise(results)):
        lines = [
            element("th", escape(method), scope="row") + "".join(element("td", cell) for cell in cells)
            for method, *cells in rows
        ]
        table = _table(["Method", *map(escape, classes)], lines, "Own data: mean over the clients that have the class.")
        sections.append(element("section", element("h2", f"{escape(title)} by class"), table))
    return sections


def _how_to_read(table: Sequence[Row], figure: FigureOfMerit) -> str:
    seeds = max(row["seeds"] for row in table)
    best, worst = ("highest", "lowest") if figure.higher_is_better else ("lowest", "highest")
    name = figure.name.lower() if figure.percent else figure.name
    interval = (
        f"± is half of the 95 % interval over {seeds} seeds (Student t)." if seeds > 1 else "One seed: no interval."
    )
    return (
        "Mean over clients after personalisation where there is any; small: before → after it. "
        f"{interval} Spread: standard deviation over clients, own data. "
        f"Worst decile: mean of the tenth of clients with the {worst} {name}, own data. Bold: {best} mean."
        + (
            " Pooled data: a sample of all clients' validation examples, predicted for a client without data."
            if any(row.get("pooled") for row in table)
            else ""
        )
    )


def _score(score: Mapping[str, Any] | None, best: float, num_rows: int, figure: FigureOfMerit) -> str:
    if not score:
        return element("td", "–")
    mean = figure.text(score["mean"])
    shown = element("b", mean) if num_rows > 1 and score["mean"] == best else mean
    interval = score.get("interval")
    before = score.get("before")
    more = element("small", f"{figure.text(before)} → {mean}") if before is not None else ""
    return element("td", shown + (f" ± {figure.text(interval)}" if interval is not None else ""), more)


def _table(names: Iterable[str], rows: Iterable[str], note: str) -> str:
    """Wide tables scroll in a narrow window; the note below does not."""
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    body = element("tbody", *(element("tr", row) for row in rows))
    return element("div", element("table", head, body), class_="scroll") + element("p", note, class_="note")


def _figures(results: Sequence[RunRecord]) -> str:
    counted = next((r for r in results if r.get("class_counts")), None)
    heat = ""
    if counted:
        heat = figures.class_counts(counted["class_counts"], counted["class_names"], client_names(counted))
    several = len({r["seed"] for r in results}) > 1
    seed = f" (seed {counted['seed']})" if counted and several else ""
    up, right, left = ("Higher", "right", "left") if figure_of(results).higher_is_better else ("Lower", "left", "right")
    shown = [
        ("What each method buys and costs", figures.trade_off(results),
         f"{up} is better for each client at home, further {right} is better on everyone's data"
         + ("; a cross is the 95 % interval over seeds." if several else ".")),
        ("Every client", figures.per_client(results),
         f"One dot per client{' and seed' if several else ''}, a diamond at the mean: "
         f"a long tail to the {left} is clients that a method fails."),
        ("Training", figures.training_curve(results),
         "The loss that clients report while they train together; methods that share the same rounds share a line."),
        ("Who holds what", heat,
         f"Each row is a client, each column a class{escape(seed)}: the more rows differ, the less alike the clients."),
    ]  # fmt: skip
    return _section("Figures", shown)


def _learning(results: Sequence[RunRecord]) -> str:
    shown = [
        (f"{figure_of(results).name} on {what}", curves.learning_curve(results, kind, against),
         f"Before personalisation, against {how}; mean over clients and seeds.")
        for kind, what in curves.KINDS.items()
        for against, how in (("round", "rounds"), ("bytes", "the bytes of all messages so far"))
    ]  # fmt: skip
    return _section("Learning curves", shown)


def _section(title: str, shown: Iterable[tuple[str, str, str]], *more: str) -> str:
    """Figures side by side, each with its name and caption; those that are empty are left out."""
    drawn = [
        element("figure", element("h3", name), element("div", figure, class_="scroll"), element("figcaption", caption))
        for name, figure, caption in shown
        if figure
    ]
    body = [element("div", *drawn, class_="figures")] if drawn else []
    return element("section", element("h2", title), *body, *more) if drawn or more else ""


def _experts(methods: Sequence[Method]) -> str:
    """The first seed of each method with several experts, and the warnings of every run."""
    shown = []
    for method in methods:
        run, title = method.runs[0], escape(method.title)
        seed = f" Seed {run['seed']}." if len(method.runs) > 1 else ""
        load, shares = (
            draw(run, f"{draw.__name__.replace('_', '-')}-{method.place}")
            for draw in (expert_figures.expert_load, expert_figures.assignment)
        )
        shown += [
            (f"{title}: who does the work", load,
             f"Each expert's share of the clients' examples; dotted: an even share.{seed}"),
            (f"{title}: what each expert is for", shares,
             f"One row for each {escape((run.get('assignment') or {}).get('of', ''))}: the share of each expert after "
             f"the last round; the darker, the more.{seed}"),
        ]  # fmt: skip
    odd = [
        element("li", escape(f"{method.title}, seed {run['seed']}, {words}"))
        for method in methods
        for run in method.runs
        for words in run.get("warnings", ())
    ]
    return _section("Experts", shown, *([element("ul", *odd, class_="note")] if odd else []))


def _traffic(methods: Sequence[Method]) -> str:
    names = ["Method", "Left the clients", "Sent to clients", "Clients that sent", "Opted out", "Rejected"]
    rows = []
    for method in methods:
        if runs := [run for run in method.runs if run.get("traffic")]:
            traffic = [run["traffic"] for run in runs]
            up, down = (_bytes(fmean(t[key] for t in traffic)) for key in ("bytes_up", "bytes_down"))
            means = [fmean(t.get(key, 0) for t in traffic) for key in ("clients_that_sent", "opted_out_clients")]
            counts = (f"{mean:,.4g}" for mean in (*means, fmean(map(rejected_updates, runs))))
            cells = (element("td", cell) for cell in (up, down, *counts))
            rows.append(element("th", escape(method.title), scope="row") + "".join(cells))
    caption = "Bytes of all messages of one run, mean over seeds. Rejected: updates that the server did not accept."
    return element("section", element("h2", "What left the clients"), _table(names, rows, caption)) if rows else ""


def _bytes(count: float) -> str:
    """
    >>> _bytes(0), _bytes(999), _bytes(1_234_567)
    ('nothing', '999 B', '1.2 MB')
    """
    if count == 0:
        return "nothing"
    power = next((p for p in range(4) if count < 1000 ** (p + 1)), 4)
    return f"{count / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _config(results: Sequence[RunRecord]) -> str:
    configs = [dict(_flat(r["config"])) for r in results]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    shared = [key for key in keys if len({config.get(key) for config in configs}) == 1]
    blocks = [element("h3", "Shared by all runs"), _lines(configs[0], shared)] if shared else []
    for result, config in zip(results, configs, strict=True):
        if differs := [key for key in keys if key not in shared and key in config]:
            blocks += [element("h3", escape(result["name"])), _lines(config, differs)]
    packages = dict.fromkeys(f"{name} {version}" for r in results for name, version in r["versions"].items())
    seconds = sum(r["seconds"] for r in results)
    backends = _distinct(r.get("backend", "not recorded") for r in results)
    made_by = f"{_distinct(packages)}; runs: {len(results)}, {seconds:,.0f} s in all; training backend: {backends}."
    details = element("details", element("summary", "Whole configuration"), *blocks)
    return element("section", element("h2", "How to repeat it"), element("p", made_by, class_="soft"), details)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """
    >>> list(_flat({"data": {"name": "digits"}, "seed": 0}))
    [('data.name', '"digits"'), ('seed', '0')]
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)


def _lines(config: Mapping[str, str], keys: Iterable[str]) -> str:
    return element("pre", escape("\n".join(f"{key} = {config[key]}" for key in keys)))
