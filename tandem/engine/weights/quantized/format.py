"""Types and functions that the readers of all quantized weight formats share.

A weight has N rows (outputs), K columns (inputs), and G groups in each row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.config.quantization import Codes, Packing, WeightScheme
from tandem.engine.kernels.packed_weight import (
    CENTRE,
    FLOAT4_TILE,
    Float4Weight,
    PackedWeight,
    float4_numbers,
    pack_nibbles,
)
from tandem.engine.models.slots import StoredPart
from tandem.protocol.errors import ModelError

FLOATS = frozenset({"F16", "BF16", "F32"})
"""The dtypes that scales may have, by their names in safetensors."""
WORDS = frozenset({"I32"})
BYTE_CENTRE = 128
"""The unsigned 8-bit code of a weight of zero."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that is part of a quantized weight in a checkpoint."""

    name: str
    """The last part of the tensor's name, after the module's name (`qweight`)."""
    shapes: tuple[Shape, ...] = ()
    """The allowed shapes of the tensor; () = any."""
    dtypes: frozenset[str] = frozenset()
    """The allowed dtypes of the tensor, by their names in safetensors; empty = any."""
    required: bool = True
    """False if the tensor may be missing."""
    read: bool = True
    """False if the tensor's values are ignored."""


def unread(*names: str) -> tuple[StoredTensor, ...]:
    """Return optional tensors of a format whose values are ignored."""
    return tuple(StoredTensor(name, required=False, read=False) for name in names)


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A quantized weight read from a checkpoint.

    weight[n, k] = codes[n, k] · scales[n, g] + offsets[n, g], where g is the group of column k.
    """

    codes: Tensor
    """The codes, [N, K]: int8, float8_e4m3fn, or uint8 with values 0 to 15, which are E2M1 if there are `factors`."""
    scales: Tensor
    """The scale of each row and group: [N, G]."""
    offsets: Tensor | None
    """The offset of each row and group, [N, G]; None = zero, or -8 · scales if the codes are 0 to 15."""
    group: int
    """The number of columns in a group."""
    groups: Tensor | None = None
    """[K] int64: the group of each column; None = column // group."""
    factors: Tensor | None = None
    """[N, 1] float32: the factor of each row, by which FP4 codes differ from integers of 4 bits; else None."""

    def packed(
        self, packing: Packing, transform: Callable[[Tensor], Tensor] | None, part: StoredPart | None = None
    ) -> PackedWeight:
        """Return the weight, or only the `part` of one rank, in the format of `packing`.

        `transform` reorders the rows; None = they keep their order.
        """

        def own(values: Tensor, group: int = 1) -> Tensor:
            values = values if part is None else part.of(values, group)
            return values if transform is None else transform(values)

        codes = own(self.codes)
        scales = own(self._of_groups(self.scales, packing.group), packing.group)
        if self.factors is not None:
            # Every rank has the factors of its rows, also if the columns are divided.
            factors = own(self.factors.expand(len(self.codes), self.codes.shape[1]))[:, 0]
            return Float4Weight(pack_nibbles(codes, FLOAT4_TILE), scales, None, packing.group, factors)
        offsets = None if self.offsets is None else own(self._of_groups(self.offsets, packing.group), packing.group)
        return PackedWeight(
            pack_nibbles(codes) if packing.codes is Codes.INT4 else codes, scales, offsets, packing.group
        )

    def matrix(self) -> Tensor:
        """Return the weight [N, K] in float32."""
        columns = self.codes.shape[1]
        groups = torch.arange(columns, device=self.codes.device) // self.group if self.groups is None else self.groups
        if self.factors is not None:
            return float4_numbers(self.codes) * (self.scales.to(torch.float32) * self.factors)[:, groups]
        codes = self.codes.to(torch.float32)
        scales = self.scales.to(torch.float32)[:, groups]
        if self.offsets is not None:
            return codes * scales + self.offsets.to(torch.float32)[:, groups]
        return (codes - CENTRE if self.codes.dtype == torch.uint8 else codes) * scales

    def _of_groups(self, values: Tensor, group: int) -> Tensor:
        """Return values [N, K / group] for groups of `group` columns; the value of each larger group is repeated."""
        count = self.codes.shape[1] // group
        return values.repeat_interleave(self.group // group, dim=1)[:, :count]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantized weights in checkpoints: lists the tensors of a weight, and reads the weight from them."""

    tensors: Callable[[WeightScheme, int, int], tuple[StoredTensor, ...]]
    """Returns the tensors that store a weight of N rows and K columns; the one with the codes is first."""
    read: Callable[[WeightScheme, Mapping[str, Tensor], Shape], GroupedCodes]
    """Returns the weight [N, K] from its tensors.

    Raises ModelError for impossible values, without the module's name.
    """


def nibbles(words: Tensor) -> Tensor:
    """Unpack 4-bit codes [..., 8·W] uint8 from words [..., W] int32, lowest bits first."""
    return byte_nibbles(words.contiguous().view(torch.uint8))


def byte_nibbles(pairs: Tensor) -> Tensor:
    """Unpack 4-bit codes [..., 2·B] uint8 from bytes [..., B], the lower half of each byte first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def codes_of(words: Tensor, codes: Codes) -> Tensor:
    """Unpack unsigned codes from 32-bit words as uint8, lowest bits first: 4-bit [..., 8·W] or 8-bit [..., 4·W]."""
    return nibbles(words) if codes is Codes.INT4 else words.contiguous().view(torch.uint8)


def centred(codes: Tensor) -> Tensor:
    """Return unsigned 8-bit codes minus 128, as int8."""
    return (codes ^ BYTE_CENTRE).view(torch.int8)


def in_word(codes: Codes) -> int:
    """Return the number of codes in a 32-bit word."""
    return 8 if codes is Codes.INT4 else 4


def integers(
    scheme: WeightScheme, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None = None
) -> GroupedCodes:
    """Return the weight (code - zero) · scale, given unsigned codes.

    `zeros` is [N, G] uint8; None = the centre of the range of codes.
    """
    columns = codes.shape[1]
    group = columns if scheme.group is None else scheme.group
    four = scheme.codes is Codes.INT4
    offsets = None
    if zeros is not None:
        from_zero = (0 if four else BYTE_CENTRE) - zeros.to(torch.float32)
        offsets = from_zero * scales.to(torch.float32)
    return GroupedCodes(codes if four else centred(codes), scales, offsets, group, groups)


def group_count(scheme: WeightScheme, columns: int) -> int:
    """Return the number of groups in a row."""
    return 1 if scheme.group is None else -(-columns // scheme.group)


def checked_groups(scheme: WeightScheme, index: Tensor | None, columns: int) -> Tensor | None:
    """Return the group of each column from `index` if groups are scattered, else None.

    Raises ModelError if a group does not exist, or if columns are out of order although the scheme is not scattered.
    """
    if index is None:
        return None
    groups, count = index.long(), group_count(scheme, columns)
    if bool(((groups < 0) | (groups >= count)).any()):
        raise ModelError(f"has a g_idx outside of its {count} groups")
    if scheme.scattered:
        return groups
    if not torch.equal(groups, torch.arange(columns, device=groups.device) // (scheme.group or columns)):
        raise ModelError("has a g_idx in another order than that of the columns, though none is configured")
    return None
