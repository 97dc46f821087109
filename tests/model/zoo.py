"""Tiny models of many families, built offline with random weights, and their comparison with one process.

`compared(model, batches, ...)` trains a copy of the model plainly, with gradient accumulation over the same
microbatches, and the pipeline beside it, for as many steps as there are batches, and says how far apart losses and
gradients are at the most. What is compared is the model's own forward: no part of the pipeline runs on that side.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import penstock


def library(name: str) -> Any:
    """transformers or diffusers, imported where a test needs it: that takes seconds, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


B, S, V, H = 4, 6, 40, 16
Batch = dict[str, Any]
Made = tuple[nn.Module, Callable[[int], Batch]]
TEXT = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"n_embd": H, "n_layer": 4, "n_head": 2, "n_positions": 32}
SEQ2SEQ = {
    "vocab_size": V, "d_model": H, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {
    "vocab_size": V, "d_model": H, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
IMAGE = {
    "hidden_size": H, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
MLA = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
WAVES = {
    "vocab_size": V, "hidden_size": H, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    "ctc_zero_infinity": True, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
TOWER = {k: TEXT[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")} | {
    "num_hidden_layers": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 8,
}  # fmt: skip
EYE = IMAGE | {"num_hidden_layers": 2, "projection_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": {}, "GPT2": GPT,
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPTNeoX": {}, "OPT": {"word_embed_proj_dim": H, "ffn_dim": 24}, "Bloom": {"n_layer": 4, "n_head": 2}, "Falcon": {},
    "Phi": {}, "Phi3": {}, "StableLm": {}, "Olmo": {}, "Olmo2": {}, "Cohere": {}, "Starcoder2": {}, "Granite": {},
    "GPTJ": GPT | {"rotary_dim": 4}, "Persimmon": {}, "Nemotron": {"head_dim": 8}, "Glm": {"head_dim": 8},
    "SmolLM3": {}, "Helium": {"head_dim": 8}, "GPTBigCode": GPT, "BioGpt": {"layerdrop": 0.0},
    "Mpt": {"d_model": H, "n_layers": 4, "n_heads": 2}, "Gemma": {"head_dim": 8}, "Gemma2": {"head_dim": 8},
    "Gemma3Text": {"head_dim": 8}, "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 8}, "Qwen3Moe": EXPERTS,
    "Olmoe": EXPERTS, "DeepseekV2": MLA | {"n_group": 1}, "DeepseekV3": MLA | {"n_group": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "Rwkv": {"attention_hidden_size": H}, "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Jamba": {
        "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "Qwen3Next": EXPERTS | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "head_dim": 8, "shared_expert_intermediate_size": 8,
    },
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": {}, "Electra": {"embedding_size": 8}, "Albert": {"embedding_size": 8},
    "DistilBert": {"dim": H, "n_layers": 4, "n_heads": 2, "hidden_dim": 24}, "Deberta": {}, "XLMRoberta": {},
    "DebertaV2": {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["c2p", "p2c"]}, "MPNet": {},
    "BigBird": {"attention_type": "original_full"}, "Nystromformer": {}, "FNet": {}, "ConvBert": {}, "RoFormer": {},
    "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 4}, "Ernie": {},
    "MobileBert": {"embedding_size": 8, "true_hidden_size": 8, "intra_bottleneck_size": 8},
}  # fmt: skip
SEQUENCES = {
    "T5": T5, "MT5": T5, "UMT5": T5, "Bart": SEQ2SEQ, "MBart": SEQ2SEQ, "Pegasus": SEQ2SEQ, "Blenderbot": SEQ2SEQ,
}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
PYRAMID = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 5}
IMAGES: dict[str, dict[str, Any]] = {
    "ViT": IMAGE, "DeiT": IMAGE, "Dinov2": IMAGE, "Swin": SWIN | {"num_labels": 5}, "Swinv2": SWIN | {"num_labels": 5},
    "ConvNext": PYRAMID | {"num_stages": 2}, "ResNet": PYRAMID | {"embedding_size": 8},
}  # fmt: skip
SOUNDS = ("Wav2Vec2", "Hubert", "WavLM")
TWO_TOWERS = ("CLIP", "Siglip")
DOWN, UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
UNET = {
    "sample_size": 8, "in_channels": 2, "out_channels": 2, "block_out_channels": (8, 16), "layers_per_block": 1,
    "norm_num_groups": 4, "attention_head_dim": 4, "down_block_types": DOWN, "up_block_types": UP,
}  # fmt: skip
DIFFUSERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "UNet2DModel": (UNET, ("sample", "timestep")),
    "UNet2DConditionModel": (
        UNET
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 8}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        ("sample", "timestep", "encoder_hidden_states"),
    ),
    "AutoencoderKL": (
        {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 2}
        | {"in_channels": 2, "out_channels": 2, "down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2},
        ("sample",),
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "patch_size": 2, "in_channels": 2, "out_channels": 2, "num_layers": 4}
        | {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 8, "caption_projection_dim": 16}
        | {"pooled_projection_dim": 8, "pos_embed_max_size": 16},
        ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"),
    ),
}


def make(family: str) -> Made:
    """A model of that family, and what makes batches of a given length."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = _make(family)
    model.train()
    without_dropout(model)
    return model, batch


def _make(family: str) -> Made:
    if family in CAUSAL:
        config = getattr(library("transformers"), f"{family}Config")(**{**TEXT, **CAUSAL[family]})
        return library("transformers").AutoModelForCausalLM.from_config(config), _text
    if family in MASKED:
        return _hugging(family, "ForMaskedLM", {**TEXT, **MASKED[family]}), _text
    if family in SEQUENCES:
        return _hugging(family, "ForConditionalGeneration", SEQUENCES[family]), _text
    if family in IMAGES:
        size = IMAGES[family].get("image_size", 32)
        return _hugging(family, "ForImageClassification", IMAGES[family]), lambda _: _image(size)
    if family in SOUNDS:
        return _hugging(family, "ForCTC", WAVES), lambda _: {
            "input_values": torch.randn(B, 400),
            "labels": torch.randint(3, V, (B, 4)),
        }
    if family in TWO_TOWERS:
        towers = {"text_config": dict(TOWER), "vision_config": dict(EYE), "projection_dim": 8}
        return _hugging(family, "Model", towers), _pairs
    kind, inputs = DIFFUSERS[family]
    return getattr(library("diffusers"), family)(**kind), lambda _: {name: _diffused(name) for name in inputs}


def _hugging(family: str, suffix: str, options: Mapping[str, Any]) -> nn.Module:
    config = getattr(library("transformers"), f"{family}Config")(**options)
    model: nn.Module = getattr(library("transformers"), family + suffix)(config)
    return model


def _text(length: int) -> Batch:
    ids = torch.randint(3, V, (B, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _image(size: int) -> Batch:
    return {"pixel_values": torch.randn(B, 3, size, size), "labels": torch.randint(0, 5, (B,))}


def _pairs(length: int) -> Batch:
    ids = torch.randint(3, V, (B, length))
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(B, 3, 16, 16), "return_loss": True}


def _diffused(name: str) -> Tensor:
    if name == "timestep":
        return torch.randint(0, 10, (B,))
    shapes = {"encoder_hidden_states": (B, 5, 8), "pooled_projections": (B, 8)}
    return torch.randn(*shapes.get(name, (B, 2, 8, 8)))


def without_dropout(model: nn.Module) -> None:
    """The plain model draws from one stream, the pipeline from one a unit call; only without can they be compared."""
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)


def own_loss(output: Any, _: Any = None) -> Tensor:
    """The model's own, or something that depends on all of the output."""
    loss = getattr(output, "loss", None)
    return output.sample.square().mean() if loss is None else loss


def compared(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Callable[..., Tensor] = own_loss,
    microbatches: int = 2,
    **options: Any,
) -> float:
    """How far the pipeline's losses and gradients are from the plain model's, relative; names must be equal."""
    plain = copy.deepcopy(model)
    rows = B // microbatches
    example = {name: _part(value, 0, rows) for name, value in batches[0].items()}
    extra = {"use_cache": False} if "use_cache" in inspect.signature(plain.forward).parameters else {}
    far = 0.0
    options = {"cut_options": penstock.CutOptions(method="replay"), **options}
    with penstock.Pipeline(model, microbatches=microbatches, loss_fn=loss, example=example, **options) as pipe:
        for batch in batches:
            found = pipe.step(**batch).loss
            expected = torch.zeros(())
            for number in range(microbatches):
                part = {name: _part(value, number * rows, rows) for name, value in batch.items()}
                share = loss(plain(**part, **extra)) / microbatches
                share.backward()
                expected = expected + share.detach()
            far = max(far, _distance("the loss", expected, found))
            far = max(far, _gradients(plain, dict(pipe.named_parameters())))
        for name, value in pipe.state_dict().items():
            if name in dict(plain.named_buffers()):
                assert torch.equal(plain.state_dict()[name], value), name
    return far


def _part(value: Any, first: int, rows: int) -> Any:
    return value[first : first + rows] if isinstance(value, Tensor) else value


def _gradients(plain: nn.Module, found: Mapping[str, nn.Parameter]) -> float:
    expected = dict(plain.named_parameters())
    assert set(expected) == set(found)
    far = 0.0
    for name, parameter in expected.items():
        assert (parameter.grad is None) == (found[name].grad is None), name
        if parameter.grad is not None:
            far = max(far, _distance(name, parameter.grad, found[name].grad))
    return far


def _distance(name: str, expected: Tensor, found: Tensor | None) -> float:
    assert found is not None, name
    assert found.isfinite().all(), name
    return (expected - found).abs().max().item() / max(expected.abs().max().item(), 1e-6)
