"""One loaded pipeline through changing recipes: its branches stay its own, and offloading goes along."""

import json

import pytest
import torch

from videospark.app.engine import TEACHER, Engine, loaded_engine
from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, current_report, state_of
from videospark.pipelines.generation import GenerationRequest
from videospark.pipelines.loading import load, save
from videospark.pipelines.offload import offload_of

REQUEST = GenerationRequest("a red circle", height=64, width=64, num_frames=5, num_inference_steps=1, seed=0)
SPARSE = {"backend": "gather", "keep_ratio": 0.3, "block_size_q": 16, "block_size_k": 16}
ROLA = {"name": "with branch", "attention": SPARSE | {"branch": "rola"}}


@pytest.fixture(scope="module")
def student(model_folder, tmp_path_factory):
    """A folder whose branch is trained, as far as anybody can tell from outside: it is not the initial one."""
    pipe = load(model_folder, device="cpu")
    accelerate(pipe, ROLA)
    for installed in state_of(pipe).installed.values():
        for tensor in installed.branch_state().values():
            torch.nn.init.normal_(tensor, std=0.5)
    return save(pipe, tmp_path_factory.mktemp("student") / "model")


def weights_said(engine):
    return {row.get("branch_weights") for row in current_report(engine.pipe).layers}


def test_a_student_keeps_its_branch_through_other_recipes(student):
    engine = Engine(str(student), "cpu")
    first = engine.run(REQUEST).frames
    dense = engine.run(REQUEST, "dense").frames
    assert not (dense == first).all()
    other = engine.run(REQUEST, load_recipe(student, keep_ratio=1.0))
    assert weights_said(engine) == {"given"} and not (other.frames == first).all()
    assert (engine.run(REQUEST).frames == first).all()
    sla = load_recipe(student, branch="sla")
    with pytest.raises(ConfigError, match="linear_branch"):
        engine.run(REQUEST, sla)
    assert (engine.run(REQUEST).frames == first).all()


def load_recipe(folder, **changes):
    from videospark.core.config import from_dict
    from videospark.pipelines.recipe import Recipe

    data = json.loads((folder / "videospark_recipe.json").read_text())
    return from_dict(Recipe, data | {"attention": data["attention"] | changes}, "recipe")


def test_a_branch_is_never_random(model_folder, student):
    with pytest.raises(ConfigError, match=r"recipe\.attention\.branch: got 'rola'.*convert.*allow_untrained"):
        load(model_folder, device="cpu", recipe=ROLA)
    pipe = load(model_folder, device="cpu", recipe=ROLA, allow_untrained=True)
    assert {row["branch_weights"] for row in current_report(pipe).layers} == {"initial"}
    dense = load(student, device="cpu", recipe="dense")
    from videospark.pipelines.acceleration import restore

    restore(dense)
    accelerate(dense, ROLA)
    assert {row["branch_weights"] for row in current_report(dense).layers} == {"given"}


def test_a_teacher_is_another_model_that_runs_densely(student, model_folder):
    engine = Engine(str(student), "cpu", teacher=str(model_folder))
    own = engine.run(REQUEST).frames
    taught = engine.run(REQUEST, TEACHER)
    assert (taught.frames == Engine(str(model_folder), "cpu").run(REQUEST, "dense").frames).all()
    assert not (taught.frames == own).all() and taught.report["recipe"]["name"] == "dense"
    assert (engine.run(REQUEST).frames == own).all()
    # Steps and guidance are the teacher's, whatever the student's defaults say.
    engine.pipe.videospark_defaults = engine.pipe.videospark_defaults | {
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
    }
    asked = GenerationRequest("a red circle", height=64, width=64, num_frames=5)
    teachers = loaded_engine(str(model_folder), device="cpu").pipe.videospark_defaults
    resolved = engine.resolve(asked, TEACHER)
    assert resolved.num_inference_steps == teachers["num_inference_steps"]
    assert engine.resolve(asked).num_inference_steps == 1
    with pytest.raises(ConfigError, match="recipe: got 'teacher'; must be another one: no teacher is known"):
        Engine(str(student), "cpu").run(REQUEST, TEACHER)


@pytest.fixture(scope="module")
def wanted(student):
    """Frames of the student by recipe, without offloading."""
    plain = Engine(str(student), "cpu")
    return {recipe: plain.run(REQUEST, recipe).frames for recipe in (None, "int8")}


@pytest.mark.parametrize("mode", ["model", "group"])
def test_recipes_change_under_offloading(student, wanted, mode):
    offloaded = loaded_engine(str(student), device="cpu", offload=mode)
    for recipe in (None, "int8"):
        assert (offloaded.run(REQUEST, recipe).frames == wanted[recipe]).all(), recipe
        assert offload_of(offloaded.pipe).mode == mode
    with pytest.raises(ConfigError, match="spark-3step"):
        offloaded.run(REQUEST, "spark-3step")
    assert offload_of(offloaded.pipe).mode == mode
    assert (offloaded.run(REQUEST).frames == wanted[None]).all()


def test_an_offloading_that_no_longer_fits_leaves_the_model_as_it_was(student, monkeypatch):
    from videospark.pipelines import offload

    engine = loaded_engine(str(student), device="cpu", offload="model")
    wanted = engine.run(REQUEST).frames
    place, calls = offload.place, []

    def failing(*arguments, **settings):
        calls.append(settings.get("recipe"))
        if len(calls) == 1:
            raise ConfigError("offload: got 'auto', and nothing fits")
        return place(*arguments, **settings)

    monkeypatch.setattr(offload, "place", failing)
    with pytest.raises(ConfigError, match="nothing fits"):
        engine.run(REQUEST, "int8")
    assert calls[0].name == "int8" and offload_of(engine.pipe).mode == "model"
    assert current_report(engine.pipe).recipe["name"] == "with branch"
    assert (engine.run(REQUEST).frames == wanted).all()


def test_an_unknown_offloading_is_refused_at_once():
    with pytest.raises(ConfigError, match="offload: got 'disk'"):
        Engine("nowhere", "cpu", None, "disk")
