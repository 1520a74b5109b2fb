"""The kernels of CPUs with adapters."""

from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.lora.lora_kernels import PlainLoraProducts


class LoraCpuKernels(PlainLoraProducts, CpuKernels):
    """The products of adapters are PyTorch's: they are small, and few of a step's tokens need each."""
