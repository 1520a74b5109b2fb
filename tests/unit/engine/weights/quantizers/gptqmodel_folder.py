"""Quantizes a folder with GPTQModel and writes its own dequantized weights beside it: SOURCE OUTPUT SCHEME.

Runs in GPTQModel's environment. SCHEME is one of SCHEMES; AWQ is missing, as the tool writes it on GPUs only.
"""

import os
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

SAMPLES, TOKENS = 32, 64
SCHEMES = {
    "gptq": {"sym": True, "desc_act": False},
    "gptq-sorted": {"sym": True, "desc_act": True, "act_group_aware": False},
    "gptq-asym": {"sym": False, "desc_act": False},
    "gptq_v2": {"sym": True, "desc_act": False, "format": "gptq_v2"},
}


def main(source: str, output: str, scheme: str) -> None:
    if not (Path(source) / "tokenizer.json").exists():
        words = {f"w{i}": i for i in range(160)}
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0", pad_token="w1"
        ).save_pretrained(source)
    model = GPTQModel.load(source, QuantizeConfig(bits=4, group_size=128, **SCHEMES[scheme]), device="cpu")
    drawn = torch.randint(3, 160, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    model.quantize([{"input_ids": ids, "attention_mask": [1] * TOKENS} for ids in drawn], batch_size=1)
    model.save(output)
    read = GPTQModel.load(output, device="cpu", backend=BACKEND.TORCH)
    values = {}
    for name, module in read.model.named_modules():
        if isinstance(module, BaseQuantLinear):
            values[f"{name}.weight"] = module.dequantize_weight().T.float().contiguous()
    save_file(values, Path(output) / "values.dequantized")


main(*sys.argv[1:])
# Threads of its pools outlive main.
os._exit(0)
