"""One page that shows a comparison. It opens without a network: style, charts and data are inside.

Markup is in templates/, looks and drawing in assets/ (report.css, report.js, and Observable Plot's bundle).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedmoe.evaluation.figure_of_merit import figure_of
from fedmoe.evaluation.metric_catalog import title_of
from fedmoe.evaluation.summary import RunRecord, summarise
from fedmoe.report import calibration, clients, expert_figures, figures
from fedmoe.report.choices import choice_sections
from fedmoe.report.figures import Figure
from fedmoe.report.leakage import leakage_section
from fedmoe.report.markdown import class_blocks, figure_text, metric_text
from fedmoe.report.methods import Method, Row, group, rejected_updates
from fedmoe.report.notes import notes
from fedmoe.report.privacy import COLUMNS, SUMMARY, privacy_section
from fedmoe.report.runs import StoredRun

PARTS = {
    "own": "Own data",
    "global": "Global test",
    "global_validation": "Balanced validation data",
    "unseen": "Unseen clients",
    "tuning": "Clients for tuning",
    "pooled": "New client, pooled data",
}


def render(runs: Sequence[StoredRun], title: str, problems: Sequence[str] = ()) -> str:
    """The whole page; runs of one method with several seeds are shown as one method.

    Args:
        problems: what there is to say of runs that could not be read, and so are not here.
    """
    results = [run.results for run in runs]
    methods = group(results)
    by_title = {run.results["title"]: run for run in reversed(runs)}  # the first seed of each method
    first = [(method, by_title[method.title]) for method in methods]
    worth = clients.worth(results)
    counted = next((result for result in results if result.get("class_counts")), None)
    shown: dict[str, Figure | None] = {
        "trade_off": figures.trade_off(results),
        "own_global": clients.own_global(results),
        "strips": clients.strips(results),
        "worth_figure": clients.worth_figure(worth),
        "learning_curves": figures.learning_curves(methods),
        "training_loss": figures.training_loss(results),
        "split": figures.split_map(counted) if counted else None,
        "reliability": calibration.reliability(results),
        "bytes_sent": figures.bytes_sent(first),
    }
    over_rounds = [expert_figures.expert_accuracy(methods), expert_figures.divergence(methods)]
    experts = [figure for method, run in first for figure in expert_figures.expert_figures(method, run)]
    experts += [figure for figure in over_rounds if figure]
    leakage = leakage_section([(method.title, run) for method, run in first])
    drawn = [figure for figure in (*shown.values(), *experts, *(leakage.figures if leakage else ())) if figure]
    merit = figure_of(results)
    data = {
        "merit": {"name": merit.name, "percent": merit.percent, "higher": merit.higher_is_better},
        "methods": [method.title for method in group(results, every_answer=True)],
        "seeds": list(dict.fromkeys(result["seed"] for result in results)),
        "clients": clients.client_table(results),
        "names": clients.names_of_clients(results),
        "figures": {figure.name: {"kind": figure.kind, **figure.data} for figure in drawn},
    }
    return page(
        "report.html",
        data,
        title=title,
        facts=_facts(results, methods),
        **_scores(results),
        problems=problems,
        worth=worth,
        experts=experts,
        warnings=_warnings(methods),
        calibration=calibration.calibration_table(results),
        choices=choice_sections(results),
        traffic=_traffic(methods),
        leakage=leakage,
        privacy=privacy_section(methods),
        privacy_columns={"summary": SUMMARY, "client": COLUMNS},
        configs=_configs(results),
        made_by=made_by(results),
        **shown,
    )


def render_split(counts: Sequence[Sequence[int]], class_names: Sequence[str], seed: int, title: str) -> str:
    """A page with nothing but who holds what."""
    drawn = figures.split_map({"class_counts": counts, "class_names": class_names, "seed": seed})
    data = {"figures": {drawn.name: {"kind": drawn.kind, **drawn.data}}} if drawn else {"figures": {}}
    return page("split.html", data, title=title, split=drawn)


def page(template: str, data: Mapping[str, Any], **context: Any) -> str:
    """A template of this package with everything inside that it needs; `data` is what report.js draws."""
    assets = {name: Markup(_asset(name)) for name in ("report.css", "report.js", "plot.min.js")}
    text: str = _environment().get_template(template).render(data=data, assets=assets, **context)
    return text


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedmoe.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"figure_text": figure_text, "metric_text": metric_text, "bytes": in_bytes}
    return environment


@cache
def _asset(name: str) -> str:
    return files("fedmoe.report").joinpath("assets", name).read_text(encoding="utf-8")


def _facts(results: Sequence[RunRecord], methods: Sequence[Method]) -> dict[str, str]:
    taking_part = {score["client"] for r in results for score in r["scores"] if not score["unseen"]}
    unseen = {s["client"] for r in results for s in r["scores"] if s["unseen"] and s["data"] == "own"}
    return {
        "Methods": str(len(methods)),
        "Seeds": _distinct(r["seed"] for r in results),
        "Clients scored": (f"{len(taking_part)}" if taking_part else "none sent scores")
        + (f", and {len(unseen)} unseen in training" if unseen else ""),
        "Rounds": _distinct(r["rounds"] for r in results if r["rounds"]) or "none",
        "Weights of a model": _distinct(f"{r['model_weights']:,}" for r in results if "model_weights" in r) or "–",
    }


def scores_section(results: Sequence[RunRecord]) -> str:
    """The tables of scores alone, for a notebook."""
    text: str = _environment().get_template("scores.html").render(_scores(results))
    return f"<div>{text}</div>"


def _scores(results: Sequence[RunRecord]) -> dict[str, Any]:
    rows = summarise(results)
    return {
        "merit": figure_of(results),
        "summary": _summary(results, rows),
        "by_class": class_blocks(results, rows),
        "notes": notes(results),
    }


def _summary(results: Sequence[RunRecord], rows: Sequence[Row]) -> dict[str, Any]:
    parts = {part: name for part, name in PARTS.items() if any(row[part] for row in rows)}
    return {
        "rows": rows,
        "parts": parts,
        "metrics": {name: title_of(name) for row in rows for name in row["metrics"]},
        "best": {part: figure_of(results).best([row[part]["mean"] for row in rows if row[part]]) for part in parts},
        "seeds": max((row["seeds"] for row in rows), default=0),
    }


def _warnings(methods: Sequence[Method]) -> list[str]:
    return [
        f"{method.title}, seed {run['seed']}, {words}"
        for method in methods
        for run in method.runs
        for words in run.get("warnings", ())
    ]


def _traffic(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Bytes of all messages of one run, mean over seeds."""
    rows = []
    for method in methods:
        if runs := [run for run in method.runs if run.get("traffic")]:
            traffic = [run["traffic"] for run in runs]
            counted = ("clients_that_sent", "opted_out_clients")
            means = [*(fmean(t.get(key, 0) for t in traffic) for key in counted), fmean(map(rejected_updates, runs))]
            sizes = [fmean(t[key] for t in traffic) for key in ("bytes_up", "bytes_down")]
            rows.append({"title": method.title, "sizes": sizes, "counts": [f"{mean:,.4g}" for mean in means]})
    return rows


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(0), in_bytes(999), in_bytes(1_234_567)
    ('nothing', '999 B', '1.2 MB')
    """
    if count == 0:
        return "nothing"
    power = next((p for p in range(4) if count < 1000 ** (p + 1)), 4)
    return f"{count / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _configs(results: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Settings that all runs share, then what is each run's own."""
    configs = [dict(_flat(r["config"])) for r in results]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    shared = {key for key in keys if len({config.get(key) for config in configs}) == 1}
    blocks = [("Shared by all runs", _lines(configs[0], (key for key in keys if key in shared)))] if shared else []
    for result, config in zip(results, configs, strict=True):
        if own := [key for key in config if key not in shared]:
            blocks.append((result["name"], _lines(config, own)))
    return blocks


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
    return "\n".join(f"{key} = {config[key]}" for key in keys)


def made_by(results: Sequence[RunRecord]) -> dict[str, str]:
    packages = (f"{name} {version}" for r in results for name, version in r["versions"].items())
    return {
        "Command": _distinct((r.get("command", "") for r in results), "\n"),
        "Versions": _distinct(packages),
        "Commit": _distinct(r.get("commit") or "not recorded" for r in results),
        "Backend": _distinct(r.get("backend", "not recorded") for r in results),
        "Split": _distinct(r.get("split_digest", "") for r in results),
        "Time": f"{sum(r['seconds'] for r in results):,.0f} s in all, {len(results)} runs",
    }


def _distinct(values: Iterable[object], between: str = ", ") -> str:
    return between.join(dict.fromkeys(str(value) for value in values))
