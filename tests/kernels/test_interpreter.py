"""Kernels are really run: on a GPU, or in Triton's interpreter."""

import torch
from triton.runtime.interpreter import InterpretedFunction

from tandem.engine.kernels.rowwise import triton_norm
from tandem.engine.kernels.triton_launch import INTERPRETED


def test_the_interpreter_is_chosen_where_there_is_no_gpu() -> None:
    assert INTERPRETED is not torch.cuda.is_available()
    assert isinstance(triton_norm._rms_norm, InterpretedFunction) is INTERPRETED
