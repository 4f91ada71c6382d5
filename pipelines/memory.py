"""Memory beside the denoiser: the text encoder, the VAE, and prompt embeddings kept on disk."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..core.config import ConfigError, require
from ..quantization.config import QuantizationConfig
from ..quantization.convert import InstalledQuantization, module_bytes
from ..quantization.convert import state_of as quantization_of
from ..quantization.text_encoder import quantize_text_encoder_
from .prompt_cache import PromptCache, fingerprint, prompt_key
from .weight_files import WeightFiles, folder_of

TEXT_ENCODER_MODES = ("keep", "int8", "free_after_encoding")
VAE_DTYPES = ("keep", "bfloat16")


@dataclass(frozen=True)
class MemoryConfig:
    """What is saved beside the denoiser.

    Attributes:
        text_encoder: "keep" leaves it; "int8" stores its linear layers in eight bits, which changes the embeddings a
            little; "free_after_encoding" lets its weights go when the denoiser begins and reads them again for the next
            prompt that is not in the cache, which changes nothing but the time.
        vae_slicing: decode several clips one by one; a single clip gains nothing.
        vae_tiling: decode videos of more than 256 pixels a side in overlapping tiles; blending them changes pixels.
        vae_dtype: "keep", which after loading is float32; "bfloat16" halves what decoding takes and changes pixels by
            rounding.
        prompt_cache: folder for prompt embeddings; None for none.

    Raises:
        ConfigError: another mode, or an empty folder name.
    """

    text_encoder: Literal["keep", "int8", "free_after_encoding"] = "keep"
    vae_slicing: bool = False
    vae_tiling: bool = False
    prompt_cache: str | None = None
    vae_dtype: Literal["keep", "bfloat16"] = "keep"

    def __post_init__(self) -> None:
        modes = TEXT_ENCODER_MODES
        require(self.text_encoder in modes, "text_encoder", self.text_encoder, f"one of {', '.join(modes)}")
        dtypes = VAE_DTYPES
        require(self.vae_dtype in dtypes, "vae_dtype", self.vae_dtype, f"one of {', '.join(dtypes)}")
        named = self.prompt_cache is None or bool(self.prompt_cache.strip())
        require(named, "prompt_cache", self.prompt_cache, "a folder, or left out")

    @property
    def active(self) -> bool:
        """Whether anything at all changes."""
        return self != MemoryConfig()


class InstalledMemory:
    """A `MemoryConfig` at work in a pipeline; made by `install_memory`."""

    def __init__(self, config: MemoryConfig, text_encoder: Any, vae: Any) -> None:
        self.config = config
        self.cache: PromptCache | None = None
        self.notes: list[str] = []
        self._text_encoder, self._vae = text_encoder, vae
        self._vae_before = (vae.use_slicing, vae.use_tiling) if vae is not None else None
        self._vae_weights: dict[str, torch.Tensor] = {}
        self._bytes_before = module_bytes(text_encoder) if text_encoder is not None else 0
        self._bytes_after: int | None = None
        self._files: WeightFiles | None = None
        self._quantized: InstalledQuantization | None = None
        self._borrowed = False
        self._identity = ""
        self._handles: list[Any] = []
        self._decode: dict[str, int] = {}

    def install(self) -> None:
        """Change the pipeline; the caller removes what was done where this raises."""
        config, vae = self.config, self._vae
        if config.prompt_cache is not None:
            self.cache = PromptCache(config.prompt_cache)
        if config.text_encoder == "free_after_encoding":
            self._prepare_freeing()
        elif config.text_encoder == "int8":
            self._quantize()
        if self.cache is not None:
            self._identity = fingerprint(self._text_encoder)
        if vae is not None:
            vae.use_slicing = vae.use_slicing or config.vae_slicing
            vae.use_tiling = vae.use_tiling or config.vae_tiling
            if config.vae_dtype == "bfloat16":
                self._narrow_vae()
        if config.vae_slicing:
            self.notes.append("vae_slicing: helps where several clips are decoded at once; a single one gains nothing")

    @torch.no_grad()
    def encode(self, pipe: Any, text: str, max_sequence_length: int) -> torch.Tensor:
        """Embeddings [1, max_sequence_length, text_dim] of one text, from the cache where it has them.

        Raises:
            ConfigError: the text encoder was let go, and its files are gone.
        """
        device = pipe._execution_device
        key, dtype = "", self._text_encoder.dtype
        if self.cache is not None:
            if self._files is None or not self._files.freed:
                self._identity = fingerprint(self._text_encoder)  # its weights may have been changed meanwhile
            key = prompt_key(self._identity, pipe.tokenizer, text, max_sequence_length, dtype)
            found = self.cache.get(key, max_sequence_length, dtype)
            if found is not None:
                return found.to(device)
        embeds: torch.Tensor
        embeds, _ = pipe.encode_prompt(
            prompt=text, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length, device=device
        )
        if self.cache is not None:
            self.cache.put(key, embeds)
        return embeds

    def release(self) -> None:
        """The prompts are encoded: let the text encoder go where the configuration says so. Again is harmless."""
        if self.config.text_encoder == "free_after_encoding" and self._files is not None:
            self._files.free()
            self._bytes_after = module_bytes(self._text_encoder)

    def note_decode(self, before: int | None, peak: dict[str, int]) -> None:
        """Keep what the VAE needed for the latest clip: resident bytes before, and the peaks of `StageTimer`."""
        self._decode = {**({} if before is None else {"rss_before_bytes": before}), **peak}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The text encoder as its own class knows it, for saving."""
        with ExitStack() as stack:
            stack.enter_context(self._wide_vae())
            freed = self._files is not None and self._files.freed
            if self._files is not None:
                self._files.load()
            if self._quantized is not None:
                stack.enter_context(self._quantized.suspended())
            try:
                yield
            finally:
                if self._files is not None and freed:
                    self._files.free(self._original_names() if self._quantized is not None else None)

    def remove(self) -> None:
        """Undo everything: the same modules with the same numbers. Again is harmless.

        Raises:
            ConfigError: the weights cannot be read again; what can be undone is undone, and a later call may succeed.
        """
        if self._vae is not None and self._vae_before is not None:
            self._vae.use_slicing, self._vae.use_tiling = self._vae_before
            self._put_vae(self._vae_weights)
            self._vae_weights = {}
        if self._files is not None:
            self._files.load()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._quantized is not None and not self._borrowed:
            self._quantized.remove()
        self._quantized = self._files = None

    def report(self) -> dict[str, Any]:
        """What is saved, in measured bytes.

        text_encoder: mode, bytes_before, bytes_after (while the denoiser runs; None before the first clip),
        bytes_waiting (originals in the memory of the CPU), weights_from. vae: slicing, tiling, dtype, bytes_waiting,
        and of the latest clip decode, the resident bytes before and at the peak. prompt_cache: see
        `PromptCache.report`; None without one.
        """
        quantized = self._quantized
        after = self._bytes_before if self.config.text_encoder == "keep" else self._bytes_after
        return {
            "text_encoder": {
                "mode": self.config.text_encoder,
                "bytes_before": self._bytes_before,
                "bytes_after": after,
                "bytes_waiting": 0 if quantized is None else quantized.report().bytes_originals,
                "weights_from": None if self._files is None else str(self._files.folder),
            },
            "vae": {
                "slicing": bool(self._vae is not None and self._vae.use_slicing),
                "tiling": bool(self._vae is not None and self._vae.use_tiling),
                "dtype": None if self._vae is None else str(self._vae.dtype).removeprefix("torch."),
                "bytes_waiting": sum(tensor.nbytes for tensor in self._vae_weights.values()),
                "decode": dict(self._decode),
            },
            "prompt_cache": None if self.cache is None else self.cache.report(),
            "notes": list(self.notes),
        }

    def _narrow_vae(self) -> None:
        """The weights of the VAE in bfloat16, in the same parameters; the wide ones wait in the memory of the CPU."""
        plain = not any(hasattr(module, "_diffusers_hook") for module in self._vae.modules())
        require(plain, "memory.vae_dtype", self.config.vae_dtype, "'keep' with group offloading of the VAE")
        wide = {name: p for name, p in self._vae.named_parameters() if p.dtype in (torch.float32, torch.float16)}
        self._vae_weights = {name: parameter.data.to("cpu", copy=True) for name, parameter in wide.items()}
        self._put_vae({name: tensor.to(torch.bfloat16) for name, tensor in self._vae_weights.items()})

    def _put_vae(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.inference_mode(False):
            for name, tensor in tensors.items():
                parameter = self._vae.get_parameter(name)
                parameter.data = tensor.to(parameter.device, copy=True)

    @contextmanager
    def _wide_vae(self) -> Iterator[None]:
        """The VAE's own numbers for the length of a `with` block."""
        if not self._vae_weights:
            yield
            return
        narrow = {name: self._vae.get_parameter(name).data for name in self._vae_weights}
        self._put_vae(self._vae_weights)
        try:
            yield
        finally:
            self._put_vae(narrow)

    def _prepare_freeing(self) -> None:
        encoder = self._text_encoder
        field = "memory.text_encoder"
        plain = not hasattr(encoder, "_diffusers_hook") and quantization_of(encoder) is None
        require(plain, field, self.config.text_encoder, "'keep' with group offloading or a quantized text encoder")
        self._files = WeightFiles(encoder, folder_of(encoder, field), field)
        reference = weakref.ref(self)

        def bring_back(*_: Any) -> None:
            owner = reference()
            if owner is not None and owner._files is not None:
                owner._files.load()

        # Whoever runs or saves it, stock pipelines included, finds it whole.
        self._handles = [
            encoder.register_forward_pre_hook(bring_back, prepend=True),
            encoder.register_state_dict_pre_hook(bring_back),
        ]

    def _quantize(self) -> None:
        encoder = self._text_encoder
        present = quantization_of(encoder)
        if present is not None:
            wanted = isinstance(present.config, QuantizationConfig) and present.config.mode == "int8_weight_only"
            require(
                wanted, "memory.text_encoder", present.config.mode, "'int8_weight_only' where it is quantized already"
            )
            self._quantized, self._borrowed = present, True
            self.notes.append("text_encoder: it was in eight bits before; restore leaves it so")
        else:
            try:
                files = WeightFiles(encoder, folder_of(encoder, "text_encoder"), "text_encoder")
            except ConfigError as error:
                files = None
                self.notes.append(f"text_encoder: its original layers wait in the memory of the CPU ({error})")
            self._quantized = quantize_text_encoder_(encoder, originals="offload")
            if files is not None:
                self._files = files
                files.free(self._original_names())
        self._bytes_after = module_bytes(encoder)

    def _original_names(self) -> list[str]:
        assert self._quantized is not None
        return [f"{layer}.{leaf}" for layer in self._quantized.replaced for leaf in ("weight", "bias")]


def install_memory(pipe: Any, config: MemoryConfig) -> InstalledMemory | None:
    """Put a configuration to work; None where it changes nothing.

    Raises:
        ConfigError: the pipeline lacks the part, it is wrapped, its weights cannot be read again, or the folder of the
            cache cannot be used. The pipeline is then unchanged.
    """
    if not config.active:
        return None
    encoder, vae = getattr(pipe, "text_encoder", None), getattr(pipe, "vae", None)
    for name, part, value in (
        ("memory.text_encoder", encoder, config.text_encoder != "keep"),
        ("memory.prompt_cache", encoder, config.prompt_cache is not None),
        ("memory.vae_slicing", vae, config.vae_slicing),
        ("memory.vae_tiling", vae, config.vae_tiling),
        ("memory.vae_dtype", vae, config.vae_dtype != "keep"),
    ):
        require(part is not None or not value, name, value, "left out where the pipeline has no such part")
    installed = InstalledMemory(config, encoder, vae)
    try:
        installed.install()
    except BaseException:
        installed.remove()
        raise
    return installed


def text_line(report: dict[str, Any]) -> str:
    """The report in one line."""
    encoder, cache = report["text_encoder"], report["prompt_cache"]
    after = encoder["bytes_after"]
    now = "not yet measured" if after is None else f"{after / 2**20:.1f} MiB"
    text = f"text encoder: {encoder['mode']}, {encoder['bytes_before'] / 2**20:.1f} MiB -> {now}"
    vae = [name for name in ("slicing", "tiling") if report["vae"][name]]
    text += f"; VAE: {' and '.join(vae) or 'whole'}"
    text += f" in {report['vae']['dtype']}" if report["vae"]["bytes_waiting"] else ""
    if cache is not None:
        text += f"; prompt cache: {cache['hits']} hits, {cache['misses']} misses, {cache['remade']} remade"
    return text
