# SPDX-License-Identifier: Apache-2.0
"""Convolutions. Parameter layouts are torch's: weight [out, in / groups, *kernel], bias [out]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nnfront.nn.functional import op
from nnfront.nn.module import Module
from nnfront.nn.parameter import Parameter
from nnfront.nn.tensor import Tensor

Amount = int | Sequence[int]


def _kernel(size: Amount, num_axes: int) -> tuple[int, ...]:
    return (size,) * num_axes if isinstance(size, int) else tuple(size)


class Conv1D(Module):
    """Convolve the last axis of [batch, in_channels, w]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: str | None = None,
    ) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.weight = Parameter((out_channels, in_channels // groups, *_kernel(kernel_size, 1)), dtype)
        self.bias = Parameter((out_channels,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in_channels, w] to [batch, out_channels, w']."""
        return op.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _Convolution(Module):
    """Convolve `_axes` axes, behind the channels or, in another `data_layout`, ahead of them."""

    _axes: int
    _layout: str
    _convolve: Callable[..., Tensor]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Amount,
        stride: Amount = 1,
        padding: Amount = 0,
        dilation: Amount = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: str | None = None,
        data_layout: str | None = None,
    ) -> None:
        """data_layout None: channels first."""
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.data_layout = self._layout if data_layout is None else data_layout
        kernel = _kernel(kernel_size, self._axes)
        self.weight = Parameter((out_channels, in_channels // groups, *kernel), dtype)
        self.bias = Parameter((out_channels,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The channels become out_channels, the other axes what the kernel leaves of them."""
        amounts = (self.stride, self.padding, self.dilation, self.groups)
        return self._convolve(x, self.weight, self.bias, *amounts, self.data_layout)


class Conv2D(_Convolution):
    """Convolve two axes of [batch, in_channels, h, w] to [batch, out_channels, h', w'], or with data_layout "NHWC" of [batch, h, w, in_channels]."""

    _axes, _layout, _convolve = 2, "NCHW", staticmethod(op.conv2d)


class Conv3D(_Convolution):
    """Convolve three axes of [batch, in_channels, d, h, w] to [batch, out_channels, d', h', w'], or with data_layout "NDHWC" of [batch, d, h, w, in_channels]."""

    _axes, _layout, _convolve = 3, "NCDHW", staticmethod(op.conv3d)


class ConvTranspose1D(Module):
    """The transposed convolution of the last axis of [batch, in_channels, w]. weight [in, out / groups, kernel]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: str | None = None,
    ) -> None:
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups
        self.weight = Parameter((in_channels, out_channels // groups, *_kernel(kernel_size, 1)), dtype)
        self.bias = Parameter((out_channels,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in_channels, w] to [batch, out_channels, w']."""
        amounts = (self.stride, self.padding, self.output_padding, self.dilation, self.groups)
        return op.conv1d_transpose(x, self.weight, self.bias, *amounts)
