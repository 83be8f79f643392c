"""CUDA IPC, by five functions of CUDA's driver and a Triton kernel that copies blocks.

CUDA's documentation: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html. The driver
opens handles of GPUs that CUDA_VISIBLE_DEVICES hides from this process. It cannot open a handle
whose GPU has no device file in this container, or one that this process made itself.
"""

import ctypes
from collections.abc import Sequence

import msgspec
import torch

from tandem.errors import Incompatible, InternalError, TandemError
from tandem.transfer.cuda_ipc.agent import BlockCopy
from tandem.transfer.reads.agent import BlockIds
from tandem_kernels.triton.blocks import copy

_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Exported(msgspec.Struct, frozen=True):
    """Metadata of a pool: the handle of the allocation that has it, and its place there."""

    handle: bytes
    offset: int


class CudaIpcDevice:
    """The device of a KV pool (see `IpcDevice`). The thread that calls the methods has this device
    as its current CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        # Reads do not wait for the engine's steps, and steps do not wait for reads.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bases: dict[int, int] = {}  # address of a peer's pool -> address that was mapped

    def export(self, address: int) -> bytes:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        pointer = ctypes.c_uint64(address)
        what = "the KV pool cannot be shared over CUDA IPC"
        self._call(
            Incompatible,
            what,
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            pointer,
        )
        self._call(Incompatible, what, "cuIpcGetMemHandle", ctypes.byref(handle), base)
        return msgspec.msgpack.encode(_Exported(bytes(handle), address - base.value))

    def open(self, metadata: bytes) -> int:
        exported = msgspec.msgpack.decode(metadata, type=_Exported)
        base = ctypes.c_uint64()
        self._call(
            Incompatible,
            "the peer's GPU memory cannot be mapped over CUDA IPC",
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(base),
            _Handle.from_buffer_copy(exported.handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        address = base.value + exported.offset
        self._bases[address] = base.value
        return address

    def close(self, address: int) -> None:
        base = ctypes.c_uint64(self._bases.pop(address))
        what = "the peer's GPU memory cannot be unmapped"
        self._call(InternalError, what, "cuIpcCloseMemHandle", base)

    def start_copy(self, copies: Sequence[BlockCopy]) -> torch.cuda.Event:
        try:
            with torch.cuda.stream(self._stream):
                for each in copies:
                    copy_blocks(each, self._device)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        except RuntimeError as error:
            raise InternalError(f"copying blocks over CUDA IPC failed: {error}") from error
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _call(self, kind: type[TandemError], what: str, function: str, *arguments: object) -> None:
        """Calls a function of the driver. Raises an error of this kind if it fails."""
        # The driver's functions need a current context. This call makes that of the device current
        # in this thread.
        self._stream.query()
        if code := getattr(self._driver, function)(*arguments):
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(name))
            text = (name.value or b"unknown error").decode()
            raise kind(f"{what}: {function} returned {code} ({text})")


def copy_blocks(blocks: BlockCopy, device: torch.device) -> None:
    """Queues the copy of blocks on the current stream. The memory of both sides must be accessible
    from `device`."""
    ids = torch.stack([torch.from_numpy(blocks.source_ids), torch.from_numpy(blocks.target_ids)])
    ids = ids.to(torch.int64)
    if device.type == "cuda":
        ids = ids.pin_memory().to(device, non_blocking=True)
    source = _parts(blocks.source, blocks.source_ids, blocks.source_stride, blocks, device)
    target = _parts(blocks.target, blocks.target_ids, blocks.target_stride, blocks, device)
    copy(source, ids[0], target, ids[1])


def _parts(
    address: int, block_ids: BlockIds, stride: int, blocks: BlockCopy, device: torch.device
) -> torch.Tensor:
    """Returns the parts of blocks as a tensor [blocks, words of 4 bytes] of this device, up to the
    last of the blocks. `address` is that of the first part.

    The device is given, not found out by the address: memory of a GPU that is hidden from this
    process belongs to no device that torch knows, but kernels of `device` can read it.
    """
    last = int(block_ids.max())
    storage = torch._C._construct_storage_from_data_pointer(
        address, device, last * stride + blocks.num_bytes
    )
    shape, strides = (last + 1, blocks.num_bytes // 4), (stride // 4, 1)
    return torch.empty(0, dtype=torch.int32, device=device).set_(storage, 0, shape, strides)
