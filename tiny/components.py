"""The parts of the tiny Wan, built from the real diffusers and transformers classes.

| part | class | size |
|---|---|---|
| tokenizer | `PreTrainedTokenizerFast`, one token per word, unknown words become `<unk>` | 31 words |
| text encoder | `UMT5EncoderModel`, 2 layers of width 128 | 0.3 M |
| transformer | `WanTransformer3DModel`, 6 layers, 3 heads of 64, patch (1, 2, 2) | 3.4 M |
| VAE | `AutoencoderKLWan` in its Wan 2.2 form, stride 4 x 8 x 8, 10 latent channels | 1.2 M |

It is conditioned as Wan 2.2 TI2V is (`expand_timesteps`): one time per token, so that the same weights serve
`WanPipeline` and, with the first latent frame kept clean, `WanImageToVideoPipeline`.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from .dataset import vocabulary
from .latents import LATENT_CHANNELS, SPATIAL_STRIDE, TEMPORAL_STRIDE

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
NUM_FRAMES = 17
FPS = 8
TEXT_WIDTH = 128
FLOW_SHIFT = 3.0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: lower case, punctuation apart, `</s>` appended, padded on the right."""
    words = [*SPECIAL_TOKENS, *vocabulary()]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", SPECIAL_TOKENS.index("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=512,
    )


def build_text_encoder() -> UMT5EncoderModel:
    """A two-layer umT5 encoder, randomly initialised."""
    config = UMT5Config(
        vocab_size=64,
        d_model=TEXT_WIDTH,
        d_kv=32,
        num_heads=4,
        d_ff=256,
        num_layers=2,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=64,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=SPECIAL_TOKENS.index("</s>"),
    )
    return UMT5EncoderModel(config).eval()


def build_vae() -> AutoencoderKLWan:
    """A Wan 2.2 style video autoencoder of stride 4 x 8 x 8 (frames, height, width), randomly initialised."""
    return AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=24,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=TEMPORAL_STRIDE,
        scale_factor_spatial=SPATIAL_STRIDE,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    ).eval()


def build_transformer() -> WanTransformer3DModel:
    """The denoiser, randomly initialised; its output layer starts at zero."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=3,
        attention_head_dim=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=512,
        num_layers=6,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    return transformer.eval()


def build_scheduler() -> UniPCMultistepScheduler:
    """The scheduler that Wan checkpoints ship with."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT, num_train_timesteps=1000
    )


def build_pipeline() -> WanPipeline:
    """A whole untrained pipeline: for tests, and as the start of training."""
    return WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=build_text_encoder(),
        vae=build_vae(),
        transformer=build_transformer(),
        scheduler=build_scheduler(),
        expand_timesteps=True,
    )
