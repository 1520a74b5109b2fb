"""The Triton product of the benchmark of tile orders: each order computes every output once."""

import pytest
import torch

from benchmarks.kernels import tile_order

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(tokens: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, k, device=DEVICE).half()
    return x, (torch.randn(n, k, device=DEVICE) * k**-0.5).half()


@pytest.mark.parametrize("group", [1, 2, 8], ids="group {}".format)
@pytest.mark.parametrize(("tokens", "n", "k"), [(385, 300, 100), (128, 256, 64), (7, 513, 130)])
def test_every_output_is_computed_in_each_order(group: int, tokens: int, n: int, k: int) -> None:
    x, weight = inputs(tokens, n, k)
    out = torch.full((tokens, n), torch.nan, dtype=x.dtype, device=DEVICE)
    tile_order.tiled_product(x, weight, out, group)
    exact = x.double() @ weight.double().t()
    baseline = (x @ weight.t()).double()
    assert (out.double() - exact).abs().max() <= 2 * (baseline - exact).abs().max() + 1e-3


def test_rows_have_the_rate_of_each_order_and_a_wrong_order_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tile_order, "race", lambda contestants: {name: run() or 2.0 for name, run in contestants.items()}
    )
    monkeypatch.setattr(torch, "matmul", lambda *_, out: None)
    x, weight = inputs(130, 260, 64)
    rate = round(2 * 130 * 260 * 64 / 2.0 / 1e6, 1)
    row = tile_order.product_row(x, weight, 8)
    assert row == dict.fromkeys(("row_major_tflops", "grouped_tflops", "cublas_tflops"), rate)
    monkeypatch.setattr(tile_order, "tiled_product", lambda _x, _w, out, _group: out.zero_())
    with pytest.raises(ValueError, match="the row_major product is off by 1"):
        tile_order.product_row(x, weight, 8)
