"""Run by test_parallel.py: one rank of a transformer under diffusers' context parallelism, or one process alone.

    python parallel_worker.py RANK RANKS INIT_FILE OUTPUT

Rank 0 writes, for every case, the output of the model and the gradients of its input and parameters, summed over ranks.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, WanTransformer3DModel
from safetensors.torch import save_file

from videospark.attention import AttentionConfig, install
from videospark.attention.config import RoLAConfig, SLAConfig

GATHER = AttentionConfig(backend="gather", keep_ratio=0.3, block_size_q=16, block_size_k=16)
ROLA = RoLAConfig(rank=16, frequencies="balanced")
CASES = {
    "dense": AttentionConfig(),
    "gather": GATHER,
    "gather-raster": dataclasses.replace(GATHER, token_order="raster"),
    "rola": dataclasses.replace(GATHER, branch="rola", rola=ROLA),
    "rola-per-head": dataclasses.replace(
        GATHER, branch="rola", rola=dataclasses.replace(ROLA, per_head_maps=True, angle_dtype="bfloat16")
    ),
    "rola-excluded": dataclasses.replace(GATHER, branch="rola", rola=dataclasses.replace(ROLA, exclude_selected=True)),
    "rola-denominator": dataclasses.replace(
        GATHER,
        branch="rola",
        rola=dataclasses.replace(ROLA, normalizer="denominator", feature_map="relu", merge="scaled"),
    ),
    "sla": dataclasses.replace(GATHER, branch="sla", sla=SLAConfig()),
}


def build() -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=32, in_channels=4, out_channels=4,
        text_dim=24, freq_dim=32, ffn_dim=96, num_layers=2, cross_attn_norm=True, rope_max_seq_len=64,
    )  # fmt: skip
    torch.nn.init.normal_(model.proj_out.weight, std=0.1)
    return model.eval()


def one_case(model: WanTransformer3DModel, config: AttentionConfig, ranks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(2, 4, 5, 8, 12, generator=generator).requires_grad_()
    text = torch.randn(2, 7, 24, generator=generator)
    installed = install(model, config, generator=torch.Generator().manual_seed(1))
    for block in model.blocks:
        # SLA starts from zero, where it would be missed by every comparison.
        for name, parameter in block.attn1.named_parameters():
            if "linear_branch.proj." in name:
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(3))
    model.zero_grad(set_to_none=True)
    out = model(latents, torch.tensor([400, 700]), text, return_dict=False)[0]
    out.square().sum().backward()
    found = {"output": out.detach(), "grad input": latents.grad}
    # Parameters after the ranks are joined again see all tokens everywhere: theirs would count twice.
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None and ".attn" in name}
    for name, tensor in found.items():
        if ranks > 1 and name != "output":
            dist.all_reduce(tensor)
    installed.remove()
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def main(rank: int, ranks: int, init_file: str, output: str) -> None:
    torch.set_num_threads(1)
    model = build()
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=ranks)
        # diffusers asks which of the accelerators is this rank's, and here there is none.
        torch.accelerator.device_count = lambda: 1
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))
    found = {}
    for case, config in CASES.items():
        found |= {f"{case}: {name}": tensor for name, tensor in one_case(model, config, ranks).items()}
    if rank == 0:
        save_file(found, output)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
