"""The formats of quantized weights; each has a module that lists a weight's tensors and reads codes and scales."""

from tandem.engine.config.quantization import WeightFormat
from tandem.engine.weights.quantized import awq, byte_codes, float4_codes, gguf_blocks, gptq, packed_integers
from tandem.engine.weights.quantized.format import Format

FORMATS: dict[WeightFormat, Format] = {
    WeightFormat.AWQ: awq.FORMAT,
    WeightFormat.GPTQ: gptq.FORMAT,
    WeightFormat.GPTQ_V2: gptq.FORMAT,
    WeightFormat.PACK_QUANTIZED: packed_integers.FORMAT,
    WeightFormat.INT_QUANTIZED: byte_codes.FORMAT,
    WeightFormat.FLOAT_QUANTIZED: byte_codes.FORMAT,
    WeightFormat.FP8_BLOCKS: byte_codes.FORMAT,
    WeightFormat.MXFP4: float4_codes.FORMAT,
    WeightFormat.NVFP4: float4_codes.FORMAT,
    WeightFormat.NVFP4_PACK_QUANTIZED: float4_codes.FORMAT,
    WeightFormat.Q8_0: gguf_blocks.FORMAT,
    WeightFormat.Q4_0: gguf_blocks.FORMAT,
    WeightFormat.Q4_1: gguf_blocks.FORMAT,
    WeightFormat.Q4_K: gguf_blocks.FORMAT,
    WeightFormat.Q6_K: gguf_blocks.FORMAT,
    WeightFormat.MXFP4_BLOCKS: gguf_blocks.FORMAT,
}
"""The readers of all formats except `ROUND_TO_NEAREST`, whose weights are stored in 16 bits."""
