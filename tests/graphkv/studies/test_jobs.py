"""How a command's studies are put together, and that they leave ordinary runs alone."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from eval.errors import UserError
from graphkv import grid
from graphkv.config import CONF, parse
from graphkv.studies import STUDIES, jobs_of


def config(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return parse(compose("config", overrides=["model=tiny", *overrides]))


@pytest.mark.parametrize("name", STUDIES)
def test_an_experiment_names_every_option_of_its_study(name):
    (job,) = jobs_of([config(f"experiment={name}")])
    assert type(job.study) is STUDIES[name] and job.info.label == "tiny"
    assert job.configs[0].study.keys() - {"name"} == vars(job.study).keys()


def test_graph_settings_of_the_figures_are_those_of_every_run():
    for name in ("fig2", "fig7"):
        plain = config("+graphkv=on").cell.graph
        assert (
            config(f"experiment={name}").cell.graph == config(f"experiment={name}", "+graphkv=on").cell.graph == plain
        )
        assert config(f"experiment={name}", "+graphkv=figure3").cell.graph == config("+graphkv=figure3").cell.graph
        assert config(f"experiment={name}", "graphkv.edge=vv").cell.graph.edge == "vv"


def test_cells_of_one_model_and_options_share_a_job():
    table = ["experiment=table3", "budget=64"]
    jobs = jobs_of(
        [
            config(*table, "scorer=snapkv"),
            config(*table, "scorer=h2o", "+graphkv=on"),
            config(*table, "scorer=snapkv", "model.dtype=bfloat16"),
            config(*table, "scorer=snapkv", "study.tokens=500"),
        ]
    )
    assert [[run.cell.name for run in job.configs] for job in jobs] == [["snapkv", "h2o"], ["snapkv"], ["snapkv"]]


def test_a_mistake_in_one_study_stops_all_of_them():
    with pytest.raises(UserError, match="looks at re-ranking"):
        jobs_of([config("experiment=table5"), config("experiment=fig2", "+graphkv=off")])
    with pytest.raises(UserError, match="study is 'fig9': choose experiment=fig2"):
        jobs_of([config("experiment=fig2", "study.name=fig9")])
    with pytest.raises(UserError, match="study is 'fig2': choose"):
        jobs_of([config("study=fig2")])


def test_a_study_and_a_task_in_one_command(tmp_path, capsys):
    task = ["task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=3", "budget=64", f"results_dir={tmp_path}"]
    study = ["experiment=table5", "study.lengths=[300]", "study.budgets=[64]", f"results_dir={tmp_path}"]
    assert grid.run([config(*task), config(*study)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tables", "figures", "tiny"}
    assert "snapkv-64@query_head" in capsys.readouterr().out


def test_two_cells_give_two_figures(run, tmp_path):
    small = ["study.tokens=300", "study.layers=[1]", "study.shown=10", "budget=64"]
    done = run("-m", "experiment=fig2", "scorer=snapkv,h2o", *small, results=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "figures").glob("fig2-tiny-*.png"))) == 2
