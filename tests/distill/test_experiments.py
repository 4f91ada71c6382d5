"""The experiments' measures against their closed forms, their reports, and a rehearsal from the command line."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.core.config import ConfigError
from videospark.distill import experiment_arms, experiments
from videospark.distill.experiment_measures import Judge
from videospark.distill.experiment_reports import dominated, spread, trap_found, write_report
from videospark.distill.experiments import QUICK, SIGMAS, Scale, Settings, Workspace, run_experiment
from videospark.evaluation.distribution import relative_distances

runner = CliRunner()


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    return Judge(str(experiments._random_model(folder / "model")), QUICK, folder, SIGMAS, device="cpu")


def other_field(judge, size=0.5, above=0.0, below=1.1):
    """The teacher with an offset of its velocity at the noise levels between `above` and `below`."""

    def field(latents, sigma, condition):
        here = ((sigma >= above) & (sigma < below)).float().view(-1, 1, 1, 1, 1)
        return judge.teacher(latents, sigma, condition) + size * here

    return field


def test_the_teacher_itself_has_no_error(judge):
    assert judge.local_losses(judge.teacher) == [0.0] * 10
    found = judge.origins(judge.many_step_end, judge.teacher, 3)
    assert found["terminal"] == 0 and found["swap"] == [0, 0, 0] and found["restore"] == [0, 0, 0]
    assert judge.trap_point(judge.teacher)["terminal"] == 0


def test_local_losses_are_by_level(judge):
    losses = judge.local_losses(other_field(judge, above=judge.teacher_states()[4][0]))
    assert losses[:5] == pytest.approx([0.25] * 5, rel=1e-4) and losses[5:] == [0.0] * 5
    states = [s for s, _ in judge.teacher_states()]
    assert states == sorted(states, reverse=True) and len(states) == 10


def test_swap_and_restore_find_the_interval(judge):
    levels = judge.shift * (2 / 3) / (1 + (judge.shift - 1) * (2 / 3))
    found = judge.origins(judge.many_step_end, other_field(judge, above=levels + 1e-4), 3)
    assert found["terminal"] > 0 and found["swap"][0] == pytest.approx(found["terminal"])
    assert found["swap"][1:] == [0, 0] and found["restore"][1:] == pytest.approx([0, 0])
    assert found["restore"][0] == pytest.approx(found["terminal"])
    # A few-step student whose first step alone is wrong. Its other steps still differ from many steps of the teacher.
    plain, off = (
        judge.few_step_end(field, [True, False, False])
        for field in (judge.teacher, other_field(judge, above=SIGMAS[0] - 1e-6))
    )
    same = [judge.few_step_end(f, [False, True, True]) for f in (judge.teacher, other_field(judge, above=0.99))]
    assert torch.equal(*same) and not torch.allclose(plain, off)


def test_teacher_latents_are_kept_and_give_the_same_result(judge, tmp_path):
    first = judge.teacher_result()
    again = Judge(str(judge._folder / "model"), QUICK, judge._folder, SIGMAS, device="cpu")
    second = again.teacher_result()
    assert first.to_dict() == second.to_dict()
    assert np.array_equal(first.samples.crossover, second.samples.crossover)
    result, seconds = again.evaluate(again.teacher, again.grid, 3.0)
    assert seconds > 0 and np.allclose(result.samples.latents, first.samples.latents, atol=1e-5)
    assert relative_distances(result.samples.crossover, first.samples.crossover).max() < 1e-5


def test_the_fewest_blocks_are_an_arm_of_their_own(judge):
    ratios = experiment_arms.trap_keep_ratios(judge)  # 2 x 8 x 8 tokens are 8 blocks of 16
    assert [max(1, int(r * 8 + 1e-9)) for r in ratios] == [8, 4, 1]


def test_a_workspace_is_of_one_experiment(tmp_path):
    settings = Settings("trap", "nowhere", False, Scale())
    Workspace(tmp_path, settings, device="cpu", say=print)
    other = Settings("trap", "nowhere", False, Scale().with_budget(0.5))
    with pytest.raises(ConfigError, match="scale: got"):
        Workspace(tmp_path, other, device="cpu", say=print)
    assert Scale().with_budget(0.5).trap_steps == Scale().trap_steps // 2
    work = Workspace(tmp_path, settings, device="cpu", say=print)
    made = []
    results = [work.result("a", 0, lambda: made.append(1) or {"x": 1}) for _ in range(2)]
    assert results == [{"x": 1}] * 2 and made == [1]


def test_every_arm_has_settings_that_are_valid(tmp_path):
    work = Workspace(tmp_path, Settings("frontier", "nowhere", False, Scale()), device="cpu", say=print)
    work.guidance = 1.5
    configs = [
        experiment_arms._few_step(work, arm, 1, "student", experiments.attention_of(0.1), arm)
        for arm in experiment_arms.FRONTIER
    ]
    assert len({c.fingerprint() for c in configs}) == len(configs)
    for branch, frequencies in experiment_arms.BRANCHES.values():
        attention = experiments.attention_of(0.05, branch, frequencies)
        assert experiments.warmup_config(work, "w", 0, attention).attention.branch == branch


def points(local, terminal):
    return [{"step": i, "local": [a, a], "terminal": b} for i, (a, b) in enumerate(zip(local, terminal, strict=True))]


def test_the_reports_count_what_is_there(tmp_path):
    assert spread([1.0, 2.0, 3.0]) == "2 [1, 3]" and spread([1.0, None]) == "n/a" and spread([0.5]) == "0.5"
    assert trap_found(points([4, 2, 1.5, 1], [1, 0.5, 0.5, 0.499])) == pytest.approx((0.5, 0.002))

    def trap(local, terminal):
        parts = {"terminal": 0.5, "sliced_wasserstein": 0.1, "swap": [0.4, 0.1, 0.0], "restore": [0.3, 0.1, 0.0]}
        return {"points": points(local, terminal), "warmup": parts, "few_steps": parts, "crossdistill": parts}

    results = {
        "keep-0.1": [trap([4, 2, 1.5, 1], [1, 0.5, 0.5, 0.499]), trap([4, 2, 1.5, 1], [1, 0.5, 0.5, 0.3])],
        "keep-1": [trap([0, 0], [0, 0]), trap([0, 0], [0, 0])],
    }
    text = write_report(tmp_path, Settings("trap", "tiny", False, Scale()), results).read_text()
    assert "| keep-0.1 | 0.5 [0.5, 0.5] | 0.201 [0.002, 0.4] | 1 of 2 |" in text and "means anything" not in text
    assert "| keep-1 | 0 [0, 0] | 0 [0, 0] | 0 of 2 |" in text
    assert Image.open(tmp_path / "trap-curves.png").size[0] > 500
    quality = {n: [{"accuracy_over_teacher": a, "entropy_over_teacher": e}] for n, a, e in
               (("good", 1.0, 1.0), ("sharp", 0.9, 0.5), ("bad", 0.5, 0.4))}  # fmt: skip
    assert dominated(quality, "bad") == ["good", "sharp"] and dominated(quality, "good") == []


def test_wrong_input_is_named(tmp_path):
    for arguments, message in (
        (("nothing",), "name: got 'nothing'"),
        (("trap", "--seeds", "0"), "seeds: got 0"),
        (("trap", "--device", "tpu"), "device: got 'tpu'"),
        (("trap", "--quick", "--budget", "2"), "budget: got 2.0"),
        (("trap", "--budget", "0"), "budget: got 0"),
    ):
        result = runner.invoke(app, ["distill", "experiment", *arguments, "--output", str(tmp_path / "x")])
        assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_a_rehearsal_runs_and_goes_on(name, tmp_path, monkeypatch, fresh):
    """One seed, stopped in the second arm, given again from the command line."""
    train, trained = Workspace.train, []

    def stop(self, config, **options):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(config.name)
        return train(self, config, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "train", stop)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(name, tmp_path, quick=True, seeds=1, device="cpu", say=lambda text: None)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "results").iterdir()}
    assert before and not (tmp_path / "report.md").exists()
    fresh()
    result = runner.invoke(app, ["distill", "experiment", name, "--output", str(tmp_path), "--quick", "--seeds", "1",
                                 "--device", "cpu"])  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report = tmp_path / "report.md"
    assert result.stdout.strip() == str(report)
    text = report.read_text()
    assert "random weights" in text and "NaN" not in text
    pictures = sorted(tmp_path.glob("*.png"))
    assert pictures and all(f"({p.name})" in text for p in pictures)
    results = {p: json.loads(p.read_text()) for p in (tmp_path / "results").iterdir()}
    assert all(p.stat().st_mtime_ns == time for p, time in before.items())
    arms = {"trap": 3, "branch": 8, "frontier": len(experiment_arms.FRONTIER)}[name]
    names = {p.name.removesuffix("-seed-0.json") for p in results}
    assert len(names) == arms and all(f"\n| {arm} |" in text for arm in names)
    assert not list((tmp_path / "runs").glob("*/checkpoints"))
