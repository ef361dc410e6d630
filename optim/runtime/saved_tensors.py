"""What autograd saves for backward: counted, and stored in another form where a technique asks for it.

One object stands round every forward (PyTorch's saved-tensor hooks do not nest: the innermost alone is called). Its
rules hold for every store:

- parameters, their views and their casts are left alone, also those that sharding gathers for a while;
- a tensor that is saved several times, or through several views, is stored once, by its storage;
- strides survive, since another layout would choose another kernel and other roundings;
- PyTorch's check for saved tensors that are modified in place ends where hooks begin, so it is made here;
- of a DTensor, this rank's part is stored, and comes back placed as it was.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trine.optim.runtime.plain_tensors import is_plain
from trine.optim.runtime.selective import counting_kept
from trine.optim.runtime.weak_storage import WeakStorage
from trine.record.events import is_heard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trine.optim.runtime.host_memory import HostMemory
    from trine.optim.techniques._assembly import Assembly

__all__ = [
    "LEAST_BYTES",
    "SavedTensors",
    "Store",
    "Stored",
    "count_when_heard",
    "local_part",
    "saved_tensors_of",
]

#: Below this, bookkeeping costs more than what it frees.
LEAST_BYTES = 4096
#: Steps in which saved bytes are counted where nothing is stored: the first ones, then one in so many.
FIRST_STEPS = 2
EVERY = 100

#: Views and casts: what they give is a parameter where they are given one.
_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in (
        *("ToCopy", "T", "Transpose", "View", "UnsafeView", "ReshapeAlias", "Permute", "Expand"),
        *("AsStrided", "Alias", "Slice", "Select", "Squeeze", "Unsqueeze", "Split", "Clone"),
    )
)


class Stored(Protocol):
    """A flat tensor in a store; given back when the last reference to it goes."""

    dtype: torch.dtype  # of the tensor that was put in
    elements: int
    device_bytes: int  # that it still takes on the model's device

    def get(self) -> torch.Tensor:
        """The flat tensor again, on its device and in its type. May be called several times."""


class Store(Protocol):
    """Where saved tensors go."""

    def choose(self, tensor: torch.Tensor) -> Store | None:
        """The store for this tensor: this one, one behind it, or none."""

    def device_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """What so many elements would take on the model's device."""

    def put(self, flat: torch.Tensor) -> Stored:
        """Take a one-dimensional tensor, which nobody changes from now on."""


class SavedTensors:
    """The hooks of one engine. Called, it gives the context for one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.store: Store | None = None
        #: Where the store moves to, if it does.
        self.host: HostMemory | None = None
        #: Called at the end of each forward that was counted.
        self.after_forward: list[Callable[[], None]] = []
        #: Count although nothing is stored otherwise: in this step, in every step.
        self.counting = False
        self.always_counting = False
        #: Nobody needs the count but a record, where one is written.
        self.for_record_alone = False
        #: Bytes on the model's device that are held for backward now, and at most since :meth:`reset`.
        self.held_bytes = 0
        self.peak_bytes = 0
        #: The same without the store.
        self.plain_bytes = 0
        self.plain_peak_bytes = 0
        #: Whether what backward brings back, restored or recomputed, is counted as long as it lives.
        self.counts_back = False
        #: With that, and with what is on its way: the most on the device at once since :meth:`reset`.
        self.backward_peak_bytes = 0
        self._back: dict[int, WeakStorage] = {}
        self._parameters: set[int] = set()  # storages, by address
        self._gathered: dict[int, WeakStorage] = {}  # parameters that sharding gathers
        self._live: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    def __call__(self) -> AbstractContextManager[Any]:
        """The context of one forward: hooks where anything is stored or counted, else nothing."""
        if self.store is not None:
            return self._hooks()
        if not self.counts:
            return nullcontext()
        # Hooks round ours would be called no more: somebody else's offloading would end without a word.
        is_free = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return self._hooks() if is_free else nullcontext()

    @property
    def counts(self) -> bool:
        """Whether what is saved is counted in this step."""
        if self.for_record_alone and not is_heard():
            return False
        return self.counting or self.always_counting

    def reset(self) -> None:
        """Begin a new peak."""
        self.peak_bytes = self.held_bytes
        self.plain_peak_bytes = self.plain_bytes
        self.backward_peak_bytes = self.held_bytes

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """A parameter, a view of one, or a cast of one."""
        address = local_part(tensor).untyped_storage()._cdata
        return address in self._parameters or address in self._gathered or _is_cast(tensor)

    def cost_bytes(self, tensor: torch.Tensor) -> int:
        """What saving this tensor's storage takes on the device, by the store's rules."""
        size = local_part(tensor).untyped_storage().nbytes()
        store = self._store_for(tensor, size)
        return size if store is None else store.device_bytes(size // tensor.element_size(), tensor.dtype)

    def note_back(self, tensor: torch.Tensor) -> None:
        """Count a tensor that backward brought back, while anything holds its storage."""
        weak = WeakStorage(local_part(tensor))
        self._back.setdefault(weak.address, weak)
        self._count(0, 0)

    def follow_pipeline(self, assembly: Assembly) -> None:
        """Keep what is moved apart by stage and micro-batch, and read it ahead in the order of their backwards."""
        host, pipeline = self.host, assembly.pipeline
        if host is None or pipeline is None:
            return

        def note(stage: Any, arguments: Any, named: dict[str, Any]) -> None:
            host.line = (stage.index, named.get("position", -1))

        for stage in assembly.parts:
            stage.register_forward_pre_hook(note, with_kwargs=True)
        host.following = pipeline.backward_after

    def watch_gathered(self, model: nn.Module) -> None:
        """Learn which storages hold gathered parameters, from modules that FSDP2 shards."""
        try:
            from torch.distributed.fsdp import FSDPModule
        except ImportError:
            return
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._note_gathered)

    # --- hooks ---------------------------------------------------------------------------------

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        model = self._model()
        if model is not None:
            self._parameters = {
                parameter.untyped_storage()._cdata
                for parameter in map(local_part, model.parameters())
                if is_plain(parameter)
            }
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), counting_kept() as kept_bytes:
            try:
                yield
            except BaseException as error:
                if getattr(
                    error, "ends_forward", False
                ):  # of a pipeline's stage, which leaves the model midway
                    self._ended(kept_bytes())
                raise
            kept = kept_bytes()  # by selective checkpoints, past the hooks
        self._ended(kept)

    def _ended(self, kept: int) -> None:
        """A forward has, with so many bytes kept by selective checkpoints."""
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + kept)
        self.plain_peak_bytes = max(self.plain_peak_bytes, self.plain_bytes + kept)
        for after in self.after_forward:
            after()

    def _note_gathered(self, module: nn.Module, arguments: Any) -> None:
        if self.store is None and not self.counts:
            return
        for parameter in map(local_part, module.parameters()):
            if is_plain(parameter):
                weak = WeakStorage(parameter)
                self._gathered[weak.address] = weak

    def _store_for(self, tensor: torch.Tensor, size: int) -> Store | None:
        if self.store is None or size < LEAST_BYTES:
            return None
        return None if self.is_parameter(tensor) else self.store.choose(tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        local = local_part(tensor)
        if not is_plain(local) or local.layout is not torch.strided:
            return _Left(tensor.detach(), None)
        # An empty view, as of an expert that no token came to, has nothing to store.
        store = self._store_for(tensor, local.untyped_storage().nbytes()) if local.numel() else None
        if store is None:
            token = None if self.is_parameter(tensor) else self._token(local)
            # Detached: an output that held itself would be a cycle through its own node, and never freed.
            return _Left(tensor.detach(), token)
        start, length = _span(local)
        versions = (tensor._version, local._version)
        key = (local.untyped_storage()._cdata, tensor.dtype, versions, start, length, id(store))
        stored = self._live.get(key)
        if stored is None:
            stored = _Counted(self, local, store.put(_flat(local, start, length)))
            self._live[key] = stored
        view = _View(stored, local.size(), local.stride(), int(local.storage_offset()) - start)
        return _Placed(view, tensor) if hasattr(tensor, "_spec") else view

    def _token(self, tensor: torch.Tensor) -> _Token:
        """Counts a storage that stays as it is, as long as anything of it is saved."""
        storage = tensor.untyped_storage()
        token = self._live.get(storage._cdata)
        if token is None:
            token = _Token(self, tensor, storage.nbytes(), storage.nbytes())
            self._live[storage._cdata] = token
        found: _Token = token
        return found

    def _count(self, device_bytes: int, plain_bytes: int) -> None:
        self.held_bytes += device_bytes
        self.plain_bytes += plain_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.plain_peak_bytes = max(self.plain_peak_bytes, self.plain_bytes)
        if self.counts_back and device_bytes >= 0:
            self.backward_peak_bytes = max(self.backward_peak_bytes, self.held_bytes + self._back_bytes())

    def _back_bytes(self) -> int:
        """On the device, restored, recomputed, or on its way."""
        total = 0 if self.host is None else self.host.device_bytes_under_way
        for address, weak in list(self._back.items()):
            storage = weak.get()
            if storage is None:
                del self._back[address]
            else:
                total += storage.nbytes()
        return total


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, and what an asynchronous collective gave; any other tensor itself.

    What is saved is used by its operator at that moment, which waits for the collective as well.
    """
    part: Any = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    found: torch.Tensor = part.wait() if type(part).__name__ == "AsyncCollectiveTensor" else part
    return found


def saved_tensors_of(assembly: Assembly) -> SavedTensors:
    """The assembly's one :class:`SavedTensors`; made, and put round every forward, when first asked for."""
    for context in assembly.contexts:
        if isinstance(context, SavedTensors):
            context.for_record_alone = False
            return context
    made = SavedTensors(assembly.facts.model)
    assembly.contexts.append(made)
    assembly.finish.append(lambda done: made.watch_gathered(done.model))
    assembly.finish.append(made.follow_pipeline)

    steps = itertools.count(1)
    made.counting = True

    def read() -> float | None:
        return float(made.peak_bytes) if made.store is not None or made.counts else None

    def read_plain() -> float | None:
        return float(made.plain_peak_bytes) if made.store is not None else None

    def read_back() -> float | None:
        return float(made.backward_peak_bytes) if made.counts_back else None

    assembly.metrics["memory/backward_activation_bytes"] = read_back
    assembly.metrics["memory/saved_activation_bytes"] = read
    assembly.metrics["memory/unstored_activation_bytes"] = read_plain

    def next_step() -> None:
        made.reset()
        step = next(steps)
        made.counting = step < FIRST_STEPS or step % EVERY == 0

    assembly.after_step.append(next_step)
    return made


def count_when_heard(assembly: Assembly) -> None:
    """Let every run's record have ``memory/saved_activation_bytes``, so that techniques have something to compare with.

    Where no technique needs the count it is made only while somebody listens, in the first steps and then now and then.
    """
    if not any(isinstance(context, SavedTensors) for context in assembly.contexts):
        saved_tensors_of(assembly).for_record_alone = True


class _Token:
    """Counts bytes for as long as it lives. Its weak reference keeps the storage's address from being reused."""

    __slots__ = ("__weakref__", "_owner", "_reference", "device_bytes", "plain_bytes")

    def __init__(
        self, owner: SavedTensors, tensor: torch.Tensor, device_bytes: int, plain_bytes: int
    ) -> None:
        self._owner = owner
        self._reference = WeakStorage(tensor)
        self.device_bytes = device_bytes
        self.plain_bytes = plain_bytes
        owner._count(device_bytes, plain_bytes)

    def __del__(self) -> None:
        self._owner._count(-self.device_bytes, -self.plain_bytes)


class _Counted(_Token):
    """A flat tensor in the store, counted. What was restored is shared while anybody uses it."""

    __slots__ = ("_fake", "_restored", "_stored")

    def __init__(self, owner: SavedTensors, tensor: torch.Tensor, stored: Stored) -> None:
        self._stored = stored
        self._fake: torch.Tensor | None = None
        self._restored: WeakStorage | None = None
        plain_bytes = stored.elements * stored.dtype.itemsize
        super().__init__(owner, tensor, stored.device_bytes, plain_bytes)

    def flat(self) -> torch.Tensor:
        """As it was put in."""
        if self._fake is not None:
            return self._fake
        if self._restored is not None:
            storage = self._restored.get()
            if storage is not None:
                empty = torch.empty(0, dtype=self._stored.dtype, device=storage.device)
                return empty.set_(storage, 0, (self._stored.elements,), (1,))
        flat = self._stored.get()
        self._restored = WeakStorage(flat)
        if flat.untyped_storage().device != flat.device:
            self._fake = flat  # its storage is on the meta device, and no tensor can be made of that
        if self._owner.counts_back:
            self._owner.note_back(flat)
        return flat


class _Left:
    """A saved tensor as it is, and its version: what changes it before backward is an error, as without hooks."""

    __slots__ = ("tensor", "token", "version")

    def __init__(self, tensor: torch.Tensor, token: _Token | None) -> None:
        self.tensor = tensor
        self.token = token
        self.version = tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            shape = tuple(self.tensor.shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{self.tensor.dtype} tensor {shape} is at version {self.tensor._version}, {self.version} was saved"
            )
        return self.tensor


class _View:
    """A saved tensor as a view of what is stored."""

    __slots__ = ("offset", "size", "stored", "stride")

    def __init__(self, stored: _Counted, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self.stored = stored
        self.size = size
        self.stride = stride
        self.offset = offset

    def get(self) -> torch.Tensor:
        return self.stored.flat().as_strided(self.size, self.stride, self.offset)


class _Placed:
    """A DTensor, of which this rank's part is stored."""

    __slots__ = ("part", "spec")

    def __init__(self, part: _View, tensor: Any) -> None:
        self.part = part
        self.spec = tensor._spec

    def get(self) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor(self.part.get(), self.spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _unpack(packed: _Left | _View | _Placed) -> torch.Tensor:
    return packed.get()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First element and length, within the storage, of what is to be stored.

    All of the storage, so that its other views share it, unless the tensor reaches over less than half.
    """
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    if 2 * reach >= whole:
        return 0, whole
    return int(tensor.storage_offset()), reach


def _flat(tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return tensor.detach().as_strided((length,), (1,), start)


def _is_cast(tensor: torch.Tensor) -> bool:
    """Whether views and casts alone lie between a parameter and this tensor."""
    node = tensor.grad_fn
    for _ in range(6):
        if node is None:
            return False
        if hasattr(node, "variable"):  # accumulates a leaf's gradient
            return isinstance(node.variable, nn.Parameter)
        following = [function for function, _ in node.next_functions if function is not None]
        if node.name() not in _SAME_VALUES or len(following) != 1:
            return False
        node = following[0]
    return False
