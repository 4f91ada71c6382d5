import pytest
import torch
from diffusers import WanPipeline
from safetensors import safe_open

from videospark.attention import AttentionConfig
from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, current_report, restore, state_of
from videospark.pipelines.generation import GenerationRequest, generate
from videospark.pipelines.loading import as_image_to_video, load, save
from videospark.pipelines.recipe import Recipe, preset
from videospark.pipelines.scheduling_few_step import FewStepScheduler
from videospark.tiny.components import build_scheduler, build_transformer


def _latents(pipe, **changes):
    settings = {"prompt": "a red circle", "height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 2}
    settings |= {"guidance_scale": 2.0, "output_type": "latent", "max_sequence_length": 32} | changes
    return pipe(**settings, generator=torch.Generator().manual_seed(0)).frames


def _sampled(**sampler):
    return {"name": "few", "attention": {"backend": "dense"}, "sampler": sampler}


def test_restore_brings_everything_back(pipe):
    before = _latents(pipe)
    processors, scheduler = dict(pipe.transformer.attn_processors), pipe.scheduler
    hooks = dict(pipe.transformer._forward_pre_hooks)
    recipe = {"name": "both", "attention": {"backend": "reference", "keep_ratio": 0.25, "block_size_q": 16,
              "block_size_k": 16}, "sampler": {"sigmas": [0.9, 0.5]}}  # fmt: skip
    report = accelerate(pipe, recipe)
    assert {row["module"] for row in report.layers} == {"transformer"}
    assert len(report.layers) == 6
    assert isinstance(pipe.scheduler, FewStepScheduler)
    assert not torch.equal(_latents(pipe), before)
    rows = current_report(pipe).to_dict()["layers"]
    # 128 tokens are eight key blocks, of which a quarter is two.
    assert all(row["actual_sparsity"] == 0.75 for row in rows)
    assert "actual_sparsity" in str(current_report(pipe))
    now = pipe.transformer.attn_processors
    assert all((now[key] is processors[key]) == ("attn2" in key) for key in now)
    restore(pipe)
    assert pipe.scheduler is scheduler
    assert all(pipe.transformer.attn_processors[key] is value for key, value in processors.items())
    assert dict(pipe.transformer._forward_pre_hooks) == hooks
    assert current_report(pipe) is None
    assert torch.equal(_latents(pipe), before)


def test_dense_recipe_changes_nothing(pipe):
    before = _latents(pipe)
    accelerate(pipe, "dense")
    assert torch.equal(_latents(pipe), before)


def test_second_accelerate_is_refused(pipe):
    accelerate(pipe, "dense")
    with pytest.raises(ConfigError, match="restore"):
        accelerate(pipe, "sparse-50")


def test_failing_accelerate_leaves_the_pipe_alone(pipe, monkeypatch):
    scheduler, processors = pipe.scheduler, dict(pipe.transformer.attn_processors)
    monkeypatch.setattr("videospark.pipelines.acceleration._follow_steps", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerate(pipe, "tiny-sparse-50")
    assert pipe.scheduler is scheduler
    assert all(pipe.transformer.attn_processors[key] is value for key, value in processors.items())


def test_flow_shift_is_put_on_a_copy(pipe):
    original = pipe.scheduler
    accelerate(pipe, _sampled(flow_shift=7.0))
    assert pipe.scheduler.config.flow_shift == 7.0 and original.config.flow_shift == 3.0
    restore(pipe)
    assert pipe.scheduler is original


@pytest.mark.parametrize("recipe", ["dense", _sampled(sigmas=[0.95, 0.6, 0.3])])
def test_attention_learns_the_step(pipe, recipe, monkeypatch):
    from videospark.attention.processors import InstalledAttention

    seen = []
    original = InstalledAttention.set_step
    monkeypatch.setattr(InstalledAttention, "set_step", lambda self, i: (seen.append(i), original(self, i))[1])
    accelerate(pipe, recipe)
    _latents(pipe, num_inference_steps=3)
    assert seen == [0, 0, 1, 1, 2, 2]


def test_missing_training_is_refused_unless_the_caller_insists(pipe):
    with pytest.raises(ConfigError, match="few-step.*allow_untrained"):
        accelerate(pipe, "spark-4step")
    assert current_report(pipe) is None
    with pytest.warns(UserWarning, match="few-step"):
        report = accelerate(pipe, "spark-4step", allow_untrained=True)
    assert report.notes
    restore(pipe)
    pipe.videospark_defaults["provides"] = ["few-step"]
    assert accelerate(pipe, "spark-4step").notes == []


def test_two_experts_are_both_accelerated(pipe):
    torch.manual_seed(1)
    second = build_transformer()
    torch.nn.init.normal_(second.proj_out.weight, std=0.05)
    both = WanPipeline(
        **{**pipe.components, "transformer_2": second, "scheduler": build_scheduler()}, boundary_ratio=0.9
    )
    both.set_progress_bar_config(disable=True)
    before = _latents(both, num_inference_steps=3)
    report = accelerate(both, "tiny-sparse-50")
    assert report.modules == ["transformer", "transformer_2"] and len(report.layers) == 12
    assert not torch.equal(_latents(both, num_inference_steps=3), before)
    assert all(row["actual_sparsity"] > 0 for row in current_report(both).layers)
    restore(both)
    assert torch.equal(_latents(both, num_inference_steps=3), before)


def test_save_and_load_with_recipe(pipe, tmp_path):
    accelerate(pipe, _sampled(sigmas=[0.95, 0.5], guidance_scale=1.0))
    request = GenerationRequest("a red circle", seed=3)
    frames = generate(pipe, request).frames
    save(pipe, tmp_path)
    assert isinstance(pipe.scheduler, FewStepScheduler)
    again = load(tmp_path, device="cpu", dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    assert again.videospark_defaults == pipe.videospark_defaults
    assert (generate(again, request).frames == frames).all()
    assert type(WanPipeline.from_pretrained(tmp_path).scheduler) is type(build_scheduler())
    assert current_report(load(tmp_path, device="cpu", recipe=preset("dense"))).recipe["name"] == "dense"
    restore(pipe)
    save(pipe, tmp_path)
    assert current_report(load(tmp_path, device="cpu")) is None


def test_bad_folders(tmp_path):
    with pytest.raises(ConfigError, match=r"model_index\.json"):
        load(tmp_path)


def test_image_pipeline_shares_everything(pipe):
    accelerate(pipe, "tiny-sparse-50")
    sibling = as_image_to_video(pipe)
    assert sibling.transformer is pipe.transformer and sibling.scheduler is pipe.scheduler
    assert current_report(sibling).recipe["name"] == "tiny-sparse-50"


def test_a_branch_is_saved_beside_the_weights_and_loaded_again(pipe, tmp_path):
    config = AttentionConfig(backend="gather", keep_ratio=0.3, block_size_q=16, block_size_k=16, branch="rola")
    recipe = Recipe("with-branch", attention=config)
    accelerate(pipe, recipe)
    installed = state_of(pipe).installed["transformer"]
    with torch.no_grad():
        for tensor in installed.branch_state().values():
            tensor += 0.25
    expected = {key: tensor.clone() for key, tensor in installed.branch_state().items()}
    folder = save(pipe, tmp_path / "model")
    restore(pipe)

    with safe_open(folder / "transformer/diffusion_pytorch_model.safetensors", "pt") as weights:
        assert not any("linear_branch" in key for key in weights.keys())  # noqa: SIM118
    again = load(folder, device="cpu")
    found = state_of(again).installed["transformer"]
    assert found.report()[0]["branch_weights"] == "given"
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.branch_state().items())
    restore(again)
    save(again, folder)
    assert not (folder / "transformer/videospark_branch.safetensors").exists()
