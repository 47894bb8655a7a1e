# SPDX-License-Identifier: Apache-2.0
"""Convolutions. Parameter layouts are torch's: weight [out, in / groups, *kernel], bias [out]."""

from __future__ import annotations

from collections.abc import Sequence

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


class Conv2D(Module):
    """Convolve two axes of [batch, in_channels, h, w], or with data_layout "NHWC" of [batch, h, w, in_channels]."""

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
        data_layout: str = "NCHW",
    ) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.data_layout = data_layout
        self.weight = Parameter((out_channels, in_channels // groups, *_kernel(kernel_size, 2)), dtype)
        self.bias = Parameter((out_channels,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The channels become out_channels, h and w those that the kernel leaves."""
        amounts = (self.stride, self.padding, self.dilation, self.groups)
        return op.conv2d(x, self.weight, self.bias, *amounts, self.data_layout)


class Conv3D(Module):
    """Convolve three axes of [batch, in_channels, d, h, w], or with data_layout "NDHWC" of [batch, d, h, w, in_channels]."""

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
        data_layout: str = "NCDHW",
    ) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.data_layout = data_layout
        self.weight = Parameter((out_channels, in_channels // groups, *_kernel(kernel_size, 3)), dtype)
        self.bias = Parameter((out_channels,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The channels become out_channels, d, h and w those that the kernel leaves."""
        amounts = (self.stride, self.padding, self.dilation, self.groups)
        return op.conv3d(x, self.weight, self.bias, *amounts, self.data_layout)


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
