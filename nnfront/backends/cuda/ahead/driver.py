# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA driver that it takes to launch machine code, through ctypes: no compiler, no other package.

`Driver` wraps libcuda.so.1, or any object that has its functions. Every call that fails is an error with the driver's own name and
text and what was being done. Sources: cuda.h of CUDA 13 for prototypes, structures and constants.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint8, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any

from nnfront.errors import LoadError, NnfrontError, RunError

MAP_BYTES, MAP_ALIGNMENT = 128, 128  # a CUtensorMap

_COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED: as many blocks on an SM as Triton's launcher gets
_PLAIN_SHARED_BYTES = 48 << 10  # what a block may have without asking for more, CUDA programming guide
_COOPERATIVE, _CLUSTER, _SPREAD, _DEPENDENT = 2, 4, 5, 6  # CU_LAUNCH_ATTRIBUTE_...
_PROMOTE_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B

_HELP = {
    2: "close what else uses the GPU, or take smaller batches",  # OUT_OF_MEMORY
    200: "the machine code is for another GPU, or damaged",  # INVALID_IMAGE
    209: "the machine code is for another GPU: export the model for this one",  # NO_BINARY_FOR_GPU
    218: "the machine code is for a newer driver",  # INVALID_PTX
    222: "the machine code is for a newer driver",  # UNSUPPORTED_PTX_VERSION
    **dict.fromkeys(
        (700, 715, 716, 717, 718, 719),  # ILLEGAL_ADDRESS, ILLEGAL_INSTRUCTION, ..., LAUNCH_FAILED
        "a kernel that was launched before has failed; CUDA_LAUNCH_BLOCKING=1 shows which",
    ),
}


class _Value(ctypes.Union):
    """CUlaunchAttributeValue, as far as it is used here."""

    _fields_ = (("numbers", c_uint * 3), ("bytes", c_uint8 * 64))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value begins at byte 8."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", _Value))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


def launch_config(
    threads: int, shared_bytes: int, *, cluster: int = 1, cooperative: bool = False, pdl: bool = False
) -> LaunchConfig:
    """Return how to launch blocks of so many threads, `cluster` of them together; grid and stream are left to each launch."""
    wanted: list[tuple[int, tuple[int, ...]]] = []
    if pdl:
        wanted.append((_DEPENDENT, (1,)))
    if cooperative:
        wanted.append((_COOPERATIVE, (1,)))
    if cluster > 1:
        wanted += [(_CLUSTER, (cluster, 1, 1)), (_SPREAD, (1,))]
    attributes = (_Attribute * len(wanted))()
    for attribute, (id, numbers) in zip(attributes, wanted, strict=True):
        attribute.id = id
        for i, number in enumerate(numbers):
            attribute.value.numbers[i] = number
    config = LaunchConfig()
    config.block[:] = threads, 1, 1
    config.shared_bytes = shared_bytes
    config.attributes = ctypes.cast(attributes, POINTER(_Attribute))  # keeps what it points to
    config.num_attributes = len(wanted)
    return config


_NUMBERS64, _NUMBERS32 = POINTER(c_uint64), POINTER(c_uint32)

# The parameters of each function. All of them return a CUresult.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncSetCacheConfig": (c_void_p, c_int),
    "cuLaunchKernelEx": (POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
    "cuTensorMapEncodeTiled": (
        *(c_void_p, c_int, c_uint32, c_void_p),
        *(_NUMBERS64, _NUMBERS64, _NUMBERS32, _NUMBERS32),
        *(c_int, c_int, c_int, c_int),
    ),
}


class Driver:
    """The CUDA driver for one GPU. Its calls may come from any thread."""

    def __init__(self, device: int = 0, library: Any = None) -> None:
        """Start the driver for the GPU of this number. Raises LoadError if there is none, or one without the functions used here."""
        self._library = library if library is not None else _open()
        self._functions = {name: self._function(name) for name in PROTOTYPES}
        self._launch = self._functions["cuLaunchKernelEx"]
        self._get_context = self._functions["cuCtxGetCurrent"]
        self._call("cuInit", 0, doing="start", error=LoadError)
        self.version = self._number("cuDriverGetVersion", doing="say its version")
        """The newest CUDA that it is for, as 1000 * major + 10 * minor."""
        self._device = self._number("cuDeviceGet", device, doing=f"find GPU {device}")
        self._context = c_void_p()
        self._kernels: dict[tuple[bytes, str], c_void_p] = {}

    @property
    def arch(self) -> str:
        """The GPU's architecture, such as `sm_90`."""
        major, minor = (
            self._number("cuDeviceGetAttribute", attribute, self._device, doing="describe the GPU")
            for attribute in _COMPUTE_CAPABILITY
        )
        return f"sm_{major}{minor}"

    def load(self, image: bytes, name: str, shared_bytes: int, origin: str) -> c_void_p:
        """Load machine code, once, and return the kernel of this name, which may then use so much shared memory.

        Raises LoadError; `origin` says in it where the code comes from.
        """
        if (known := self._kernels.get((image, name))) is not None:
            return known
        module, kernel = c_void_p(), c_void_p()
        load = partial(self._call, doing=f"load {name} from {origin}", error=LoadError)
        give = partial(
            self._call, doing=f"give {name} {shared_bytes} bytes of shared memory", error=LoadError
        )
        with self._in_context():
            load("cuModuleLoadData", ctypes.byref(module), image)
            load("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
            if shared_bytes > _PLAIN_SHARED_BYTES:
                give("cuFuncSetCacheConfig", kernel, _PREFER_SHARED)
                give("cuFuncSetAttribute", kernel, _MAX_DYNAMIC_SHARED, shared_bytes)
        return self._kernels.setdefault((image, name), kernel)

    def launch(self, name: str, kernel: c_void_p, config: LaunchConfig, parameters: Any) -> None:
        """Launch a kernel; `parameters` is an array of pointers to its parameters. Raises RunError."""
        if self._is_current():
            code = self._launch(config, kernel, parameters, None)
        else:
            with self._in_context():
                code = self._launch(config, kernel, parameters, None)
        if code:
            self._fail(code, f"launch {name}", RunError)

    def encode_map(
        self,
        into: int,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        box: Sequence[int],
        element: int,
        element_bytes: int,
        swizzle: int,
        nan: bool = False,
    ) -> None:
        """Write a CUtensorMap to the host address `into`, which must be a multiple of 128.

        `shape`, `strides` (in elements, the last one 1) and `box` begin with the slowest axis; `element` is a CUtensorMapDataType;
        `nan` fills what lies outside with NaN instead of zeros. Raises RunError for a tensor that cannot be described.
        """
        rank = len(shape)
        sizes = (c_uint64 * rank)(*reversed(shape))
        steps = (c_uint64 * rank)(*(stride * element_bytes for stride in reversed(strides[:-1])))
        boxes, ones = (c_uint32 * rank)(*reversed(box)), (c_uint32 * rank)(*[1] * rank)
        with nullcontext() if self._is_current() else self._in_context():
            self._call(
                "cuTensorMapEncodeTiled",
                into,
                element,
                rank,
                address,
                sizes,
                steps,
                boxes,
                ones,
                0,  # not interleaved
                swizzle,
                _PROMOTE_128,
                int(nan),
                doing=f"describe a tensor of {list(shape)} with strides {list(strides)} at {address:#x}",
            )
        last = sum((size - 1) * step for size, step in zip(sizes, (element_bytes, *steps), strict=False))
        if self.version <= 13010 and last + 1 < 128 << 10:
            # These drivers set a bit that they should not in maps of small tensors; CUTLASS and Triton clear it as well.
            ctypes.cast(into, _NUMBERS64)[1] &= ~(1 << 21)

    def _is_current(self) -> bool:
        """Whether the GPU's primary context, which torch uses too, is this thread's."""
        current = c_void_p()
        return (
            self._get_context(ctypes.byref(current)) == 0
            and current.value is not None
            and current.value == self._context.value
        )

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        """Make the GPU's primary context this thread's; one of another GPU comes back in the end."""
        before = c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(before), doing="open the GPU")
        if not self._context:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device, doing="open the GPU")
            self._context = context
        self._call("cuCtxSetCurrent", self._context, doing="open the GPU")
        try:
            yield
        finally:
            if before and before.value != self._context.value:
                self._call("cuCtxSetCurrent", before, doing="return to the GPU that was used before")

    def _function(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise LoadError(
                f"the CUDA driver here has no {name}", help="it is too old: install one for CUDA 12 or newer"
            ) from None
        function.argtypes, function.restype = PROTOTYPES[name], c_int
        return function

    def _number(self, name: str, *rest: Any, doing: str) -> int:
        value = c_int()
        self._call(name, ctypes.byref(value), *rest, doing=doing, error=LoadError)
        return value.value

    def _call(self, name: str, *args: Any, doing: str, error: type[NnfrontError] = RunError) -> None:
        code = self._functions[name](*args)
        if code:
            self._fail(code, doing, error)

    def _fail(self, code: int, doing: str, error: type[NnfrontError]) -> None:
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            known = self._functions[function](code, ctypes.byref(text)) == 0 and text.value is not None
            words.append(text.value.decode() if known and text.value else "unknown")
        raise error(
            f"the CUDA driver could not {doing}",
            details=[f"{words[0]} ({code}): {words[1]}"],
            help=_HELP.get(code, ""),
        )


def version_text(version: int) -> str:
    """A driver's version in words: 13000 is `13.0`."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _open() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LoadError(
            "there is no CUDA driver here",
            details=[str(error)],
            help="install NVIDIA's driver, or compile for 'cpu'",
        ) from None
