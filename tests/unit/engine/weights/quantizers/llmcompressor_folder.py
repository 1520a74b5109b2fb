"""Quantizes a folder with llmcompressor and writes its own dequantized weights beside it: SOURCE OUTPUT SCHEME METHOD.

Runs in llmcompressor's environment. METHOD is `rtn`, `gptq-static` or `gptq-weight`: GPTQ with that order of columns.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedTokenizerFast

SAMPLES, TOKENS = 16, 64


def main(source: str, output: str, scheme: str, method: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    settings = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}
    if method == "rtn":
        recipe = QuantizationModifier(**settings)
    else:
        recipe = GPTQModifier(**settings, actorder=method.removeprefix("gptq-"))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(3, model.config.vocab_size, (SAMPLES, TOKENS), generator=generator).tolist()
    oneshot(
        model=model,
        recipe=recipe,
        processor=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))),
        dataset=Dataset.from_dict({"input_ids": drawn, "attention_mask": [[1] * TOKENS] * SAMPLES}),
        num_calibration_samples=SAMPLES,
        max_seq_length=TOKENS,
    )
    model.save_pretrained(output, save_compressed=True)
    read = AutoModelForCausalLM.from_pretrained(
        output, dtype="auto", quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    values = {
        name: tensor.float().contiguous() for name, tensor in read.state_dict().items() if name.endswith("weight")
    }
    save_file(values, Path(output) / "values.dequantized")


main(*sys.argv[1:])
