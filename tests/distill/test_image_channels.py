"""Models that are given the first frame in channels of their own (Wan 2.1 and 2.2 I2V): data, field, every method."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import videospark
from videospark.core.config import ConfigError
from videospark.distill.config import DataConfig
from videospark.distill.data import BatchReader, PreparedData
from videospark.distill.denoiser import Denoiser, as_field
from videospark.distill.flow import Condition
from videospark.distill.prepare import TeacherSampling, prepare
from videospark.distill.run import run, stock_pipeline
from videospark.distill.sources import ClipSize, clips_from_tiny_world, prompts_from_file

SIZE = ClipSize(height=64, width=64, num_frames=5)
DEFAULTS = {
    "height": 64, "width": 64, "num_frames": 5, "fps": 8, "num_inference_steps": 2, "guidance_scale": 3.0,
}  # fmt: skip
LENGTHS = {"wan2.1": 512, "wan2.2": 32}
"""Of the prompts; diffusers knows a picture's tokens by their place before the last 512."""


def image_pipeline(*, attends, experts=1):
    """A random pipeline shaped like Wan 2.1 I2V (attends to the picture), or like Wan 2.2 I2V (two experts)."""
    from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    from videospark.tiny.components import build_pipeline

    torch.manual_seed(0)
    stock = build_pipeline()
    channels = stock.vae.config.z_dim
    settings = dict(stock.transformer.config) | {
        "num_layers": 2, "ffn_dim": 64, "num_attention_heads": 1, "in_channels": 2 * channels + 4,
        "out_channels": channels,
    }  # fmt: skip
    settings.pop("_use_default_values", None)  # from_config would take the defaults of what it names
    parts = {"image_encoder": None, "image_processor": None}
    if attends:
        settings |= {"image_dim": 24, "added_kv_proj_dim": settings["attention_head_dim"]}
        vision = CLIPVisionConfig(
            hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28,
            patch_size=14,
        )  # fmt: skip
        processor = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        parts = {"image_encoder": CLIPVisionModel(vision).eval(), "image_processor": processor}
    made = []
    for _ in range(experts):
        made.append(WanTransformer3DModel.from_config(settings).eval())
        torch.nn.init.normal_(made[-1].proj_out.weight, std=0.05)
    pipe = WanImageToVideoPipeline(
        tokenizer=stock.tokenizer, text_encoder=stock.text_encoder, vae=stock.vae, scheduler=stock.scheduler,
        transformer=made[0], transformer_2=made[1] if experts == 2 else None,
        boundary_ratio=0.8 if experts == 2 else None, **parts,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """By name a folder with a model and prepared data."""
    made = {}
    for name, options in (("wan2.1", {"attends": True}), ("wan2.2", {"attends": False, "experts": 2})):
        folder = tmp_path_factory.mktemp(name)
        image_pipeline(**options).save_pretrained(folder / "model")
        (folder / "model" / "videospark_defaults.json").write_text(
            json.dumps(DEFAULTS | {"max_sequence_length": LENGTHS[name]})
        )
        pipe = stock_pipeline(str(folder / "model"), torch.float32)
        made[name] = folder
        prepare(pipe, clips_from_tiny_world(4, SIZE), folder / "data", source="tiny-world", model="random", size=SIZE,
                max_sequence_length=LENGTHS[name])  # fmt: skip
    return made


def test_prepared_pictures_are_what_the_pipeline_gives_its_model(worlds):
    """The latents that the stock pipeline hands to the transformer, caught on the way."""
    folder = worlds["wan2.1"]
    data = PreparedData(folder / "data")
    pipe = stock_pipeline(str(folder / "model"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    seen = {}

    def catch(module, args, kwargs):
        seen.update(kwargs)

    pipe.transformer.register_forward_pre_hook(catch, with_kwargs=True)
    item = clips_from_tiny_world(4, SIZE)[1]
    pipe(image=Image.fromarray(item.frames()[0]), prompt=item.caption, height=64, width=64, num_frames=5,
         num_inference_steps=1, guidance_scale=1.0, max_sequence_length=512, output_type="latent")  # fmt: skip
    channels = pipe.vae.config.z_dim
    latents, embeds = data.read_images([1])
    assert data.settings.image_channels == channels + 4 == latents.shape[1] and data.settings.image_dim == 24
    assert torch.allclose(latents, seen["hidden_states"][:, channels:], atol=0.02, rtol=0.01)
    assert torch.allclose(embeds, seen["encoder_hidden_states_image"], atol=0.02, rtol=0.01)
    # Ones where the frame is given, zeros elsewhere.
    assert (latents[0, :4, 0] == 1).all() and not latents[0, :4, 1:].any()
    reader = BatchReader(data, DataConfig("d"), seed=0, batch_size=2, micro_batches=1, max_sequence_length=512,
                         drop_prompts=False)  # fmt: skip
    condition = reader.batch(0, 0).condition
    reader.close()
    assert condition.image_latents.shape[:2] == (2, channels + 4) and condition.image_embeds.shape[0] == 2
    free = condition.unconditional()
    assert torch.equal(free.image_latents, condition.image_latents) and free.prompt_embeds.shape[0] == 2
    second = condition.rows(torch.tensor([1]))
    assert torch.equal(second.image_embeds, condition.image_embeds[1:]) and second.first_frame is None


@torch.no_grad()
def test_the_field_is_what_the_pipeline_computes(worlds):
    for name, folder in worlds.items():
        pipe = stock_pipeline(str(folder / "model"), torch.float32)
        experts = {n: getattr(pipe, n) for n in ("transformer", "transformer_2") if getattr(pipe, n) is not None}
        field = as_field(Denoiser(experts, boundary_ratio=pipe.config.boundary_ratio, expand_timesteps=False))
        data = PreparedData(folder / "data")
        rows = [data.read(i)[0] for i in range(2)]
        latents, (image, embeds) = torch.stack(rows), data.read_images(range(2))
        prompt = torch.randn(2, LENGTHS[name], data.settings.text_dim)
        sigma = torch.tensor([0.9, 0.3])
        got = field(latents, sigma, Condition(prompt, prompt[:1], image_latents=image, image_embeds=embeds))
        for i, expert in enumerate((pipe.transformer, pipe.transformer_2 or pipe.transformer)):
            one = slice(i, i + 1)
            expected = expert(
                torch.cat([latents, image], 1)[one], sigma[one] * 1000, prompt[one],
                encoder_hidden_states_image=None if embeds is None else embeds[one], return_dict=False,
            )[0]  # fmt: skip
            assert torch.allclose(got[one], expected, atol=1e-5), name
        with pytest.raises(ConfigError, match="channels of the image: got 0"):
            field(latents, sigma, Condition(prompt, prompt[:1]))


METHODS = {
    "sparse_warmup": {"sparse_warmup": {"start_keep_ratio": 0.6, "alignment_weight": 0.5}},
    "pcm": {"pcm": {"solver_steps": 10, "target": "ema"}},
    "dmd": {"dmd": {"critic_updates": 1}},
    "crossdistill": {"dmd": {"critic_updates": 1}, "pcm": {"solver_steps": 10}},
}


@pytest.mark.parametrize(
    "name, method",
    [(n, m) for n in ("wan2.1", "wan2.2") for m in METHODS if (n, m) != ("wan2.2", "dmd")],
)
def test_every_method_trains_and_the_student_makes_a_clip(worlds, build, tmp_path, name, method):
    folder = worlds[name]
    training = {"num_steps": 4, "batch_size": 1, "checkpoint_every": 4}
    config = build(folder, tmp_path, method, training, data={"image_share": 0.0}, samples={"every": 4, "count": 1},
                   **METHODS[method])  # fmt: skip
    result = run(config, device="cpu")
    assert (tmp_path / "samples" / "step-00000004.png").is_file()
    pipe = videospark.load(result.student, device="cpu")
    before = stock_pipeline(str(folder / "model"), torch.float32)
    weight, old = pipe.transformer.patch_embedding.weight, before.transformer.patch_embedding.weight
    extra = old.shape[1] // 2
    assert not torch.equal(weight[:, extra:], old[:, extra:])  # the picture's channels learn as well
    if method != "crossdistill":
        return
    pipe.set_progress_bar_config(disable=True)
    out = pipe(image=Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)), prompt="a red circle", height=64,
               width=64, num_frames=5, num_inference_steps=3, guidance_scale=1.0, max_sequence_length=LENGTHS[name],
               output_type="latent").frames  # fmt: skip
    assert torch.isfinite(out).all()


def test_a_teacher_that_starts_from_a_picture_makes_clips(worlds, tmp_path):
    pipe = stock_pipeline(str(worlds["wan2.1"] / "model"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    picture = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")
    (tmp_path / "p.csv").write_text("prompt,image\na red circle,a.png\n")
    (tmp_path / "p.txt").write_text("a red circle\n")
    options = {"source": "prompts", "model": "random", "size": SIZE, "max_sequence_length": 512,
               "sampling": TeacherSampling(1, 1.0)}  # fmt: skip
    report = prepare(pipe, prompts_from_file(tmp_path / "p.csv", SIZE), tmp_path / "d", **options)
    assert (report.total, report.bad) == (1, ())
    image, _ = PreparedData(tmp_path / "d").read_images([0])
    assert image.abs().max() > 0
    with pytest.raises(ConfigError, match="image: got"):
        prepare(pipe, prompts_from_file(tmp_path / "p.txt", SIZE), tmp_path / "e", **options)


def test_a_prompt_of_another_length_is_refused(worlds, build, tmp_path):
    model = {"teacher": str(worlds["wan2.1"] / "model"), "max_sequence_length": 64}
    config = build(worlds["wan2.1"], tmp_path, "pcm", data={"image_share": 0.0}, model=model)
    with pytest.raises(ConfigError, match="max_sequence_length: got 64"):
        run(config, device="cpu")


def test_data_without_pictures_is_refused(worlds, world, build, tmp_path):
    config = build(worlds["wan2.1"], tmp_path, "pcm", data={"image_share": 0.0, "path": str(world / "data")})
    with pytest.raises(ConfigError, match="data image_channels: got 0"):
        run(config, device="cpu")
