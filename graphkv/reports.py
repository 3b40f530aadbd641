"""What is shown of a command's records: tables on the screen, tables and figures in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean

import pandas as pd

from eval import ablation_figures, ablation_tables, ablations, fidelity_table, table1, table1_render
from eval import fig4 as needle_figure
from eval.errors import UserError
from eval.figures import needle_heatmap
from eval.records import key_of
from eval.samples import Sample
from eval.tables import as_text, cell_table
from graphkv.provenance import check_alike
from graphkv.work import Group


def report(groups: Sequence[Group]) -> None:
    """Print the tables of a command and draw its figures, as its `artifact` says."""
    asked: dict[str, list[Group]] = {}
    for group in groups:
        asked.setdefault(artifact_of(group), []).append(group)
    for name, together in asked.items():
        check_alike(together, together[0].config.force)
        try:
            ARTIFACTS[name](together)
        except OSError as error:
            folder = together[0].config.results_dir
            raise UserError(f"cannot write tables and figures to {folder}: {error.strerror}") from error


def artifact_of(group: Group) -> str:
    """What a group's records become: what the configuration says, else what suits the task."""
    name = group.config.artifact or {"longbench": "table1"}.get(group.config.task["name"], group.config.task["name"])
    if name not in ARTIFACTS:
        raise UserError(f"artifact={name} is unknown: choose one of {', '.join(ARTIFACTS)}, or null")
    task = MADE_OF.get(name, group.config.task["name"])
    if task != group.config.task["name"]:
        raise UserError(f"artifact={name} is made of task={task}, not of task={group.config.task['name']}")
    return name


def needle(groups: Sequence[Group]) -> None:
    """A table of cells and a heat map a cell (Fig. 4) for each model."""
    for group in groups:
        samples, score, model = group.task.samples, group.task.main_score, group.config.model
        cells = {cell.label: group.records(number) for number, cell in enumerate(group.cells)}
        print(as_text(cell_table(cells, [sample.id for sample in samples], score)))
        panels = [(label, _needle_frame(records, samples, score)) for label, records in cells.items()]
        if all(frame["score"].isna().all() for _, frame in panels):
            continue
        kept = ", ".join(_achieved(records, samples) for records in cells.values())
        caption = (
            f"{model.label}, {model.dtype}; {len(samples)} samples a panel; colour: {score}; "
            f"tokens kept a layer, by panel: {kept}"
        )
        for path in needle_heatmap(panels, stem([group], "figures", score), score=score, caption=caption):
            print(path)


def longbench(groups: Sequence[Group]) -> None:
    """Table 1. Models share a table; what cannot be compared, such as two protocols, gets a table each."""
    comparable: dict[str, list[Group]] = {}
    for group in groups:
        facts = {**group.task.facts, "dtype": group.config.model.dtype, "decode": asdict(group.config.decode)}
        comparable.setdefault(key_of(facts), []).append(group)
    for together in comparable.values():
        table = table1.build([results_of(group) for group in together])
        print(table1_render.as_text(table))
        for path in table1_render.write(table, stem(together, "tables")):
            print(path)


def fidelity(groups: Sequence[Group]) -> None:
    """Divergence from the full cache, for each model: a table with paired differences, and a figure."""
    for group in groups:
        rows, paths = fidelity_table.write(results_of(group), stem([group], "tables"))
        print(as_text(fidelity_table.brief(rows)))
        for path in paths:
            print(path)


def fig4(groups: Sequence[Group]) -> None:
    """The needle's heat maps beside the paper's means, for each model."""
    for group in groups:
        score = group.task.main_score
        cells = [
            needle_figure.NeedleCell(
                cell.label, cell.describe(), _needle_frame(group.records(i), group.task.samples, score)
            )
            for i, cell in enumerate(group.cells)
        ]
        facts = {
            "model": group.config.model.label,
            "dtype": group.config.model.dtype,
            "data_hash": group.task.facts["data_hash"],
            "needles": " ".join(group.task.facts["needles"]),
        }
        figure = needle_figure.build(cells, score, facts)
        print(f"{figure.title}\n\n{as_text(figure.means)}\n\n{figure.caption}")
        for path in needle_figure.write(figure, stem([group], "figures", score)):
            print(path)


def ablation(name: str, groups: Sequence[Group]) -> None:
    """A figure or table of `eval.ablations` for each model, and for each setting that is not what it varies."""
    for group in groups:
        for found in ablations.build(results_of(group), name):
            print(ablation_tables.as_text(found))
            kind, room = ("tables", ablation_tables) if found.design.table else ("figures", ablation_figures)
            for path in room.write(found, stem([group], kind, found.title)):
                print(path)


ARTIFACTS: dict[str, Callable[[Sequence[Group]], None]] = {
    "needle": needle,
    "fig4": fig4,
    "table1": longbench,
    "fidelity": fidelity,
    **{name: partial(ablation, name) for name in ablations.DESIGNS},
}
MADE_OF = {"needle": "needle", "fig4": "needle", **dict.fromkeys(["table1", *ablations.DESIGNS], "longbench")}
"""The task whose records an artifact needs."""


def results_of(group: Group) -> table1.ModelResults:
    """The records of a group in the form that tables and figures are made from."""
    return table1.ModelResults(
        model=group.config.model.label,
        facts={**group.task.facts, "dtype": group.config.model.dtype},
        samples=[(sample.id, sample.task) for sample in group.task.samples],
        cells=[
            table1.CellResult(cell.label, cell.describe(), group.records(number))
            for number, cell in enumerate(group.cells)
        ],
    )


def stem(groups: Sequence[Group], kind: str, *more: str) -> Path:
    """Path without suffix of a table or figure: the run's name, models, and a hash of the cells and samples shown."""
    asked = [
        [[store.key for by_task in group.stores for store in by_task.values()], [s.id for s in group.task.samples]]
        for group in groups
    ]
    models = "+".join(dict.fromkeys(group.config.model.label for group in groups))
    config = groups[0].config
    return Path(config.results_dir) / kind / f"{config.name}-{models}-{key_of({'asked': [asked, more]})[:8]}"


def _needle_frame(records: Mapping[str, Mapping], samples: Sequence[Sample], score: str) -> pd.DataFrame:
    """Length, depth, score and tokens kept a layer of every sample that was asked for; NaN where there is no result."""
    rows = []
    for sample in samples:
        record = records.get(sample.id, {})
        found = (record.get("scores", {}).get(score), mean(record["kept"]) if "kept" in record else None)
        rows.append((sample.id, sample.meta["length"], sample.meta["depth"], *found))
    columns = ["sample", "length", "depth", "score", "kept"]
    return pd.DataFrame(rows, columns=columns).astype({"score": float, "kept": float})


def _achieved(records: Mapping[str, Mapping], samples: Sequence[Sample]) -> str:
    kept = [mean(records[s.id]["kept"]) for s in samples if records.get(s.id, {}).get("status") == "ok"]
    return f"{mean(kept):.0f}" if kept else "—"
