"""The tables of a model's adapters, one for each product that they may change, and the writing of an adapter into them.

A slot of the tables may be written while steps run: no step reads a slot whose number none of its tokens has.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.engine.adapters.modules import PlacedUpdate, Product
from tandem.engine.kernels.lora.tables import LoraTables
from tandem.engine.weights.tensor_reader import check_range, read_tensors
from tandem.protocol.errors import ModelError


class AdapterTables:
    """The tables of some products of a model, zeroed at first; ranks are padded to `rank`."""

    def __init__(
        self, products: Mapping[int, Product], slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._tables: dict[int, LoraTables] = {}
        self.by_weight: dict[int, LoraTables] = {}
        """The tables by the `id` of the product's weight."""
        for number, product in products.items():
            (n, k), ends = product.shape, product.part_ends
            a = torch.zeros(slots, len(ends) * rank, k, dtype=dtype, device=device)
            b = torch.zeros(slots, n, rank, dtype=dtype, device=device)
            self._tables[number] = self.by_weight[product.weight] = LoraTables(a, b, ends)

    def write(self, slot: int, updates: Sequence[PlacedUpdate]) -> None:
        """Replaces what a slot has by these updates; it is complete on return. Any thread may call it."""
        by_product: dict[int, list[PlacedUpdate]] = defaultdict(list)
        for each in updates:
            by_product[each.place.product].append(each)
        with torch.inference_mode(), self._beside_steps():
            for number, tables in self._tables.items():
                a, b = _matrices(tables, by_product[number])
                tables.a[slot].copy_(a)
                tables.b[slot].copy_(b)

    @contextlib.contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Has the copies inside run on a stream of their own, so that no step waits for them."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # where the tables were zeroed
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _check_size(placed: PlacedUpdate, a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """Raises ModelError unless A and the scaled B, and what they may make of an input of length 1, are finite."""
    gains = [torch.linalg.vector_norm(matrix, dtype=torch.float64).item() for matrix in (a, b)]
    if not max(*gains, gains[0] * gains[1]) <= torch.finfo(dtype).max:
        raise ModelError(
            f"{placed.update.a.file}: the update of {placed.module} has numbers that are not finite, or not within"
            f" {dtype}, with its scale of {placed.update.scale:g}; check lora_alpha and the weights."
        )


def _matrices(tables: LoraTables, updates: Sequence[PlacedUpdate]) -> tuple[Tensor, Tensor]:
    """Returns a slot of the tables in host memory: of each update its B, and its A for the parts of its rows."""
    rank = tables.rank
    into_a, into_b = (torch.zeros(each.shape[1:], dtype=each.dtype) for each in (tables.a, tables.b))
    for each in updates:
        update, place = each.update, each.place
        a, b = (torch.empty(entry.shape, dtype=torch.float32) for entry in (update.a, update.b))
        read_tensors({"a": update.a, "b": update.b}, {"a": a, "b": b})
        if place.transform is not None:
            b = place.transform(b)
        b.mul_(update.scale)
        for matrix, entry in ((a, update.a), (b, update.b)):
            check_range(matrix, tables.b.dtype, f"{entry.file}: the update of {each.module}")
        _check_size(each, a, b, tables.b.dtype)
        end = place.first + len(b)
        into_b[place.first : end, : update.rank] = b.to(into_b)
        for part, rows in enumerate(tables.part_rows):
            if rows.start < end and place.first < rows.stop:
                into_a[part * rank : part * rank + update.rank] = a.to(into_a)
    return into_a, into_b
