"""`load_int8`: a compressed-tensors INT8 (W8A8) checkpoint as a transformers model whose experts run on our kernels.

transformers has no experts that hold int8 weights, so the work is divided. Our own reader packs the experts as they are
stored. All other tensors go through transformers' public ``from_pretrained(None, config=..., state_dict=...)``, which maps
names, ties embeddings, casts and computes buffers as it does for every model: nothing of that is done again here. In that
state dict the experts' parameters are zeros of one element, expanded, which take neither memory nor time; the packed
experts replace them afterwards. This needs no patch of transformers and no private function of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ... import checkpoint
from ... import isa as levels
from ...checkpoint import Checkpoint, LayerReader
from ...checkpoint.files import scan
from ...errors import CheckpointError
from .experts import install, read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*experts(?:\.|$)")  # of files and of modules; not shared_experts
READ = (".weight", ".weight_scale")  # what the reader takes of an INT8 expert
SHOWN = 5  # names in a message


def load_int8(
    path: str | Path, *, dtype: torch.dtype = torch.bfloat16, isa: str | None = None, **options: Any
) -> PreTrainedModel:
    """The model of a checkpoint folder (config.json and safetensors), ready to generate.

    Experts stay INT8: weights as stored, activations quantized per token at run time. Other quantized linear layers
    (attention, shared experts) are dequantized to ``dtype`` and run by torch, their activations as they are. MoE layers
    that the checkpoint left in floating point are packed in BF16. Memory is that of the loaded model and about one layer.

    Args:
        dtype: of everything beside the experts, and of the hidden states.
        isa: CPU level of the experts' kernels, as for `pack_experts`.
        options: further arguments of ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        CheckpointError: no MoE model, no INT8 experts, another quantization, tensors that are missing or do not fit.
        UnsupportedISAError: a level that this CPU lacks.
    """
    opened = checkpoint.open(path)
    stored = {index: opened.layer(index).dtype for index in opened.layers}
    if "int8" not in stored.values():
        raise CheckpointError(
            f"{path}: its experts are not stored in INT8; load it with from_pretrained and quantize them with "
            "prepare_(model, dtype='int8')"
        )
    for kind in set(stored.values()):
        levels.choose(kind, isa)  # what cannot run is said before anything is read
    model, modules = load_dense(opened, stored, dtype, options)
    install_experts(opened, modules, isa)
    return model


def load_dense(
    opened: Checkpoint, stored: dict[int, str], dtype: torch.dtype, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[int, nn.Module]]:
    """The model with everything but its experts, and the modules that await those, by layer."""
    config = plain_config(opened.path)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=dtype)
    names = experts_modules(outline)
    if sorted(names) != opened.layers:
        raise CheckpointError(
            f"{opened.path}: transformers' {type(outline).__name__} has experts in layers {sorted(names)}, by config.json "
            f"they are in {opened.layers}; load it with from_pretrained"
        )
    tensors = dense_tensors(opened, stored, outline._keys_to_ignore_on_load_unexpected or (), dtype)
    for name in names.values():
        for parameter, value in outline.get_submodule(name).named_parameters():
            tensors[f"{name}.{parameter}"] = torch.zeros((), dtype=value.dtype).expand(value.shape)
    model, report = type(outline).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, generation_config=generation_config(opened.path),
        output_loading_info=True, ignore_mismatched_sizes=True, **options,
    )  # fmt: skip
    check_complete(opened.path, report)
    model.name_or_path = model.config.name_or_path = str(opened.path)
    return model, {index: model.get_submodule(name) for index, name in names.items()}


def install_experts(opened: Checkpoint, modules: dict[int, nn.Module], isa: str | None) -> None:
    """Packs layer after layer into its module, with a progress bar on a terminal."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("packing experts", total=sum(opened.layer(index).num_experts for index in modules))
        for index, module in modules.items():
            reader = opened.layer(index)
            check_module(module, reader)
            install(module, reader.pack(isa=isa, progress=lambda _: bar.advance(task)))


def check_module(module: nn.Module, reader: LayerReader) -> None:
    """The module asks for our implementation, and it is for experts of this size and activation."""
    recipe = read(module)
    if isinstance(recipe, str):
        raise CheckpointError(f"layer {reader.index}: {recipe}; update transformers or load a BF16 checkpoint with it")
    got = recipe.activation, tuple(recipe.w13.shape), tuple(recipe.w2.shape)
    E, H, I = reader.num_experts, reader.hidden_size, reader.intermediate_size
    expected = {k: v for k, v in reader.options.items() if v is not None}, (E, 2 * I, H), (E, H, I)
    if got != expected:
        raise CheckpointError(f"layer {reader.index}: transformers has experts {got}, the checkpoint {expected}")


def plain_config(path: Path) -> Any:
    """The model's config without its quantization, for which transformers would look for modules of its own."""
    config = AutoConfig.from_pretrained(path)
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config


def generation_config(path: Path) -> GenerationConfig | None:
    """That of the checkpoint; where it has none (None), transformers makes one of the model's config."""
    return GenerationConfig.from_pretrained(path) if (path / "generation_config.json").exists() else None


def experts_modules(model: nn.Module) -> dict[int, str]:
    """The name of each layer's experts module: all experts of a layer are one parameter there."""
    found = {}
    for name, module in model.named_modules():
        layer = EXPERTS.search(name)
        if layer and isinstance(getattr(module, "down_proj", None), nn.Parameter):
            found[int(layer[1])] = name
    return found


def dense_tensors(
    opened: Checkpoint, stored: dict[int, str], ignored: Iterable[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every tensor that belongs to no expert and that no pattern of ``ignored`` matches; int8 weights dequantized."""
    files = scan(opened.path)
    handles = {file: safe_open(file, framework="pt") for file in set(files.values())}
    found = {}
    for name, file in files.items():
        of_weight = name.endswith("_scale") and name.removesuffix("_scale") in files
        if of_weight or is_expert(name, stored) or any(re.search(pattern, name) for pattern in ignored):
            continue
        tensor = handles[file].get_tensor(name)
        if tensor.dtype == torch.int8:
            scale = f"{name}_scale"
            if scale not in files:
                raise CheckpointError(
                    f"{file}: {name!r} is int8, but {scale!r} is missing; convert the checkpoint again"
                )
            tensor = dequantized(name, tensor, handles[files[scale]].get_tensor(scale), dtype)
        found[name] = tensor
    return found


def is_expert(name: str, stored: dict[int, str]) -> bool:
    """Whether the reader takes this tensor; CheckpointError for one of INT8 experts that it would leave out."""
    found = EXPERTS.search(name)
    if found is None or int(found[1]) not in stored:
        return False
    if stored[int(found[1])] == "int8" and not name.endswith(READ):
        raise CheckpointError(
            f"tensor {name!r}: of INT8 experts only weights and their scales are supported; use a BF16 checkpoint and "
            "prepare_(model, dtype='int8')"
        )
    return True


def dequantized(name: str, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [N, K] times [N, 1], rounded once."""
    if weight.dim() != 2 or scale.shape != (len(weight), 1):
        raise CheckpointError(
            f"tensor {name!r} {tuple(weight.shape)} has a scale {tuple(scale.shape)}, expected [N, K] and [N, 1]; "
            "convert the checkpoint again"
        )
    return (weight.float() * scale.float()).to(dtype)


def check_complete(path: Path, report: dict[str, Any]) -> None:
    """CheckpointError by name where transformers would leave parameters at random; what it has no place for, it lists."""
    problems = {
        "no tensor for": sorted(report["missing_keys"]),
        "tensors of another shape for": [
            f"{name} ({list(got)}, expected {list(expected)})"
            for name, got, expected in sorted(report["mismatched_keys"])
        ],
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            shown = ", ".join(names[:SHOWN])
            raise CheckpointError(f"{path}: the checkpoint has {problem} {shown}{more}; download or convert it again")
