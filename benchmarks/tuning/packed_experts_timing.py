"""Times experts whose weights are codes, beside bfloat16: `python -m benchmarks.tuning.packed_experts_timing`.

One layer's routed experts as in `benchmarks.experts`, with the same random weights rounded to codes. The share of the
run's own copy bandwidth is that of the codes, scales and router that a step reads. The last line is one JSON object.
"""

import argparse
import json
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.command_line import need_gpu
from benchmarks.gpu.ceilings import copy_bandwidth
from benchmarks.gpu.experts_timing import ExpertLayer, compile_steps
from tandem.engine.config.quantization import Codes, Packing
from tandem.engine.kernels.experts.packed_experts import prepared_experts
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tandem.engine.models.shapes import shape_names
from tandem.engine.weights.quantized.rounding import rounded

TOKENS = (1, 8, 32, 128, 256, 2048)
FORMS = {
    "int8": (Codes.INT8, 0),
    "fp8": (Codes.FLOAT8, 0),
    "fp8_blocks": (Codes.FLOAT8, 128),
    "int4": (Codes.INT4, 128),
}
"""The type of codes, and the columns of a group; 0 = one scale a row."""

Row = dict[str, float | str]


class PackedExpertLayer(ExpertLayer):
    """A layer whose experts are codes."""

    def __init__(self, name: str, form: str) -> None:
        super().__init__(name)
        gate_up, down = (_packed(matrix, form) for matrix in self.experts.matrices)
        self.experts = prepared_experts(replace(self.experts, gate_up=gate_up, down=down), torch.bfloat16)


def expert_bytes(layer: ExpertLayer) -> float:
    """Returns the bytes of one expert."""
    weights: tuple[Weight, ...] = (layer.experts.gate_up, layer.experts.down)
    return sum(weight.nbytes for weight in weights) / layer.shape.experts


def main() -> None:
    """Prints one line for each shape, form and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=shape_names())
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    options = parser.parse_args()
    need_gpu()
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.3f} TB/s on {torch.cuda.get_device_name()}")
    rows: list[Row] = []
    for shape in options.shapes:
        half: dict[int, float] = {}
        for form in ("bfloat16", *options.forms):
            layer = ExpertLayer(shape) if form == "bfloat16" else PackedExpertLayer(shape, form)
            failures = compile_steps((layer, tokens, None) for tokens in options.tokens)
            for tokens, failure in zip(options.tokens, failures, strict=True):
                if failure is not None:
                    print(f"{shape} {form} {tokens}: {failure}")
                    continue
                step = layer.measure(tokens)
                half.setdefault(tokens, step.seconds)
                read = step.hit * expert_bytes(layer) + 2 * (layer.shape.experts + 2 * tokens) * layer.shape.hidden
                rows.append({
                    "shape": shape, "form": form, "tokens": tokens, "us": round(step.seconds * 1e6, 2),
                    "times_bf16": round(half[tokens] / step.seconds, 3), "hit": round(step.hit, 1),
                    "share_of_copy": round(read / step.seconds / copy, 3),
                    "tflops": round(step.flops / step.seconds / 1e12, 1),
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"copy": copy, "experts": rows}))


def _packed(weight: Tensor, form: str) -> PackedWeight:
    codes, group = FORMS[form]
    packing = Packing(codes, group or weight.shape[-1], offsets=False)
    # Some experts at a time, as they are widened to float32.
    parts = [rounded(each, packing) for each in torch.split(weight, 16)]
    joined = [torch.cat(tensors) for tensors in zip(*(part.parts() for part in parts), strict=True)]
    return PackedWeight(joined[0], joined[1], None, packing.group)


if __name__ == "__main__":
    main()
