"""The kernels of all devices, behind the interface in `base.py`.

`reference.py` runs on any device, `cuda.py` on NVIDIA GPUs, and `cpu/kernels.py` on CPUs.
"""
