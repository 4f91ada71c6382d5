"""The ComfyUI nodes by their contract, without ComfyUI: a small executor runs workflows as its API takes them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import imageio.v3 as imageio
import pytest
import torch

from videospark.app.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from videospark.app.comfyui.nodes import MODEL, OFFLOADS, PRESETS, RECIPE

BUILT_IN = {"STRING", "INT", "FLOAT", "BOOLEAN", "IMAGE", MODEL, RECIPE}


class Executor:
    """Runs a workflow in ComfyUI's API format: nodes by number, links as [node, output]; keeps the node objects."""

    def __init__(self):
        self.objects = {}

    def run(self, workflow):
        done = {}
        for number in sorted(workflow, key=int):
            node = workflow[number]
            kind = NODE_CLASS_MAPPINGS[node["class_type"]]
            inputs = kind.INPUT_TYPES()
            known = {**inputs["required"], **inputs.get("optional", {})}
            values = {}
            for name, value in node["inputs"].items():
                linked = isinstance(value, list)
                if linked:
                    source = NODE_CLASS_MAPPINGS[workflow[value[0]]["class_type"]]
                    assert source.RETURN_TYPES[value[1]] == known[name][0], f"{name}: types differ"
                values[name] = done[value[0]][value[1]] if linked else value
            assert set(inputs["required"]) <= set(values)
            made = self.objects.setdefault(number, kind())
            done[number] = getattr(made, kind.FUNCTION)(**values)
            assert isinstance(done[number], tuple) and len(done[number]) == len(kind.RETURN_TYPES)
        return done

    def close(self):
        for made in self.objects.values():
            loaded = getattr(made, "_loaded", None)
            if loaded is not None:
                loaded.service.close()


@pytest.fixture
def executor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    executor = Executor()
    yield executor
    executor.close()


def workflow(model, **settings):
    return {
        "1": {"class_type": "VideosparkLoadStudent", "inputs": {"model": str(model), "device": "cpu"}},
        "2": {"class_type": "VideosparkTextToVideo",
              "inputs": {"model": ["1", 0], "prompt": "a red circle", "seed": 3, **settings}},
    }  # fmt: skip


@pytest.mark.parametrize("name", NODE_CLASS_MAPPINGS)
def test_each_node_keeps_the_contract(name):
    kind = NODE_CLASS_MAPPINGS[name]
    assert name in NODE_DISPLAY_NAME_MAPPINGS and kind.CATEGORY == "videospark"
    assert len(kind.RETURN_TYPES) == len(kind.RETURN_NAMES) and set(kind.RETURN_TYPES) <= BUILT_IN
    inputs = kind.INPUT_TYPES()
    assert set(inputs) <= {"required", "optional", "hidden"} and inputs["required"]
    parameters = inspect.signature(getattr(kind, kind.FUNCTION)).parameters
    for group in ("required", "optional"):
        for key, (type_, *rest) in inputs.get(group, {}).items():
            assert isinstance(type_, list) or type_ in BUILT_IN
            assert key in parameters, f"{key} is not taken by {kind.FUNCTION}"
            if group == "optional":
                assert parameters[key].default is not inspect.Parameter.empty
            default = (rest[0] if rest else {}).get("default")
            if isinstance(type_, list) and default is not None:
                assert default in type_
            if type_ in ("INT", "FLOAT"):
                assert rest[0]["min"] <= default <= rest[0]["max"]
    json.dumps(inputs)  # ComfyUI sends them to the browser


def test_the_lists_are_those_of_the_product():
    from videospark.pipelines.offload import MODES
    from videospark.pipelines.recipe import preset_names

    assert list(PRESETS) == preset_names()
    assert set(OFFLOADS) == set(MODES)


def test_importing_the_nodes_costs_nothing():
    code = "import videospark.app.comfyui, sys, json; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "diffusers", "transformers", "numpy", "PIL"} & set(json.loads(done.stdout))


def test_the_one_line_that_comfyui_loads(tmp_path):
    """ComfyUI loads a file of custom_nodes by its path and reads the two mappings off it."""
    import importlib.util

    file = tmp_path / "videospark.py"
    file.write_text("from videospark.app.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS\n")
    spec = importlib.util.spec_from_file_location(str(file).replace(".", "_x_"), file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS is NODE_CLASS_MAPPINGS


def test_text_to_video_and_the_same_clip_again(executor, model_folder):
    graph = workflow(model_folder, width=64, height=48, frames=5, steps=2, guidance=2.0)
    frames, fps, video, sidecar = executor.run(graph)["2"]
    assert frames.shape == (5, 48, 64, 3) and frames.dtype == torch.float32 and 0 <= frames.min() <= frames.max() <= 1
    assert fps == 8 and imageio.imread(video).shape == (5, 48, 64, 3)
    assert Path(video).parent.resolve() == Path("output/videospark").resolve()
    data = json.loads(Path(sidecar).read_text(encoding="utf-8"))
    assert data["request"]["seed"] == 3 and data["request"]["guidance_scale"] == 2.0
    # The frames are those of the library, bit for bit, and not read back from the mp4.
    from videospark.pipelines.generation import GenerationRequest, generate
    from videospark.pipelines.loading import load

    pipe = load(model_folder, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    request = GenerationRequest(
        "a red circle", height=48, width=64, num_frames=5, seed=3, num_inference_steps=2, guidance_scale=2.0
    )
    wanted = generate(pipe, request)
    assert torch.equal(frames, torch.from_numpy(wanted.frames).float() / 255)
    again = executor.run(graph)["2"]
    assert torch.equal(again[0], frames) and again[2] != video


def test_recipe_and_image(executor, model_folder):
    graph = workflow(model_folder)
    graph["2"]["class_type"] = "VideosparkImageToVideo"
    graph["2"]["inputs"]["image"] = ["0", 0]
    graph = {str(int(number) + 1): node for number, node in graph.items()}
    graph["3"]["inputs"] |= {"model": ["2", 0], "recipe": ["1", 0]}
    graph["1"] = {"class_type": "VideosparkRecipe", "inputs": {"preset": "tiny-sparse-50", "keep_ratio": 0.25}}
    picture = torch.zeros(2, 40, 40, 3)
    picture[..., 0] = 0.8
    del graph["3"]["inputs"]["image"]
    done = {}
    for number in ("1", "2"):
        done |= executor.run({number: graph[number]})
    node = NODE_CLASS_MAPPINGS["VideosparkImageToVideo"]()
    inputs = {key: value for key, value in graph["3"]["inputs"].items() if not isinstance(value, list)}
    frames, _, _, sidecar = node.generate(model=done["2"][0], recipe=done["1"][0], image=picture, **inputs)
    data = json.loads(Path(sidecar).read_text(encoding="utf-8"))
    assert frames.shape == (5, 64, 64, 3)
    assert data["recipe"]["attention"]["keep_ratio"] == 0.25 and data["request"]["image"]


def test_a_student_keeps_its_branch_under_the_recipe_node(executor, model_folder, tmp_path):
    """The node changes the keep ratio of the student's own recipe; the branch stays the one that came with it."""
    from videospark.pipelines.acceleration import accelerate, current_report, state_of
    from videospark.pipelines.loading import load, save

    pipe = load(model_folder, device="cpu")
    sparse = {"backend": "gather", "keep_ratio": 0.3, "block_size_q": 16, "block_size_k": 16, "branch": "rola"}
    accelerate(pipe, {"name": "student", "attention": sparse})
    for tensor in state_of(pipe).installed["transformer"].branch_state().values():
        torch.nn.init.normal_(tensor, std=0.5)
    student = save(pipe, tmp_path / "student")
    graph = workflow(student, steps=1)
    file = str(student / "videospark_recipe.json")
    recipe = NODE_CLASS_MAPPINGS["VideosparkRecipe"]().choose("dense", file=file, keep_ratio=0.6)[0]
    loaded = executor.run({"1": graph["1"]})["1"][0]
    node = NODE_CLASS_MAPPINGS["VideosparkTextToVideo"]()
    node.generate(loaded, "a red circle", 0, steps=1, recipe=recipe)
    rows = current_report(loaded.engine.pipe).layers
    assert {(row["keep_ratio"], row["branch_weights"]) for row in rows} == {(0.6, "given")}


def test_a_node_that_is_gone_gives_the_model_back(model_folder, monkeypatch, tmp_path):
    import gc

    monkeypatch.chdir(tmp_path)
    node = NODE_CLASS_MAPPINGS["VideosparkLoadStudent"]()
    (loaded,) = node.load(str(model_folder), device="cpu")
    threads = loaded.service._threads
    assert all(thread.is_alive() for thread in threads)
    del node, loaded
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)


def test_what_is_wrong_is_said(executor, model_folder):
    with pytest.raises(ValueError, match="prompt"):
        executor.run({**workflow(model_folder), "2": {**workflow(model_folder)["2"], "inputs": {
            "model": ["1", 0], "prompt": " ", "seed": 0}}})  # fmt: skip
    with pytest.raises(ValueError, match="frames"):
        executor.run(workflow(model_folder, frames=6))
    with pytest.raises(ValueError, match="keep_ratio"):
        NODE_CLASS_MAPPINGS["VideosparkRecipe"]().choose("dense", keep_ratio=0.5)
    with pytest.raises(FileNotFoundError, match="model"):
        NODE_CLASS_MAPPINGS["VideosparkLoadStudent"]().load("no/such/model/anywhere")


def test_progress_and_cancelling_go_through_comfyui(executor, model_folder, monkeypatch):
    """Modules of ComfyUI's names, as they are in its process."""
    seen, interrupted = [], []

    class Bar:
        def __init__(self, total):
            seen.append(("total", total))

        def update_absolute(self, value, total):
            seen.append((value, total))

    class Interrupted(Exception):
        pass

    def throw():
        if interrupted:
            raise Interrupted

    management, utils = types.ModuleType("comfy.model_management"), types.ModuleType("comfy.utils")
    paths = types.ModuleType("folder_paths")
    management.throw_exception_if_processing_interrupted, management.unload_all_models = (
        throw,
        lambda: seen.append("un"),
    )
    utils.ProgressBar, paths.get_output_directory = Bar, lambda: str(Path("theirs").resolve())
    for module in (management, utils, paths):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    done = executor.run(workflow(model_folder, steps=3))
    assert seen[0] == "un" and ("total", 3) in seen and (3, 3) in seen
    assert Path("theirs/videospark") in Path(done["2"][2]).relative_to(Path.cwd()).parents
    interrupted.append(True)
    with pytest.raises(Interrupted):
        executor.run(workflow(model_folder, steps=3))
    interrupted.clear()
    assert executor.run(workflow(model_folder, steps=2))["2"][0].shape[0] == 5
